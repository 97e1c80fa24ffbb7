"""The text of each token of a sample, by the tokenizer of its run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from rollfeed.errors import CheckpointError, in_one_line
from rollfeed.protocols import Tokenizer
from rollfeed.store import RunReader
from rollfeed.store.layout import MODEL
from rollfeed.viewer.found_runs import is_evaluation

_log = logging.getLogger("rollfeed.view")
_BEFORE = ("a", "0", " ", "=")
"""Texts of which a tokenizer knows one; a token is decoded behind it, as many texts lose a space at their beginning."""
_PART = "\ufffd"


class TokenTexts:
    """The texts of tokens of one tokenizer, each decoded once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before = self._first_known()
        self._prefix = self._decode([])
        self._texts: dict[int, str] = {}

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return a text a token ``(N,)``; a character of several tokens is the first one's, the others have none."""
        known = self._texts
        for token in set(token_ids) - known.keys():
            known[token] = self._text([token])
        found = [known[token] for token in token_ids]
        for start, end in self._runs_of_parts(found):
            found[start:end] = [self._text(token_ids[start:end]), *[""] * (end - start - 1)]
        return found

    def _runs_of_parts(self, found: Sequence[str]) -> Iterator[tuple[int, int]]:
        start: int | None = None
        for place, text in enumerate([*found, ""]):
            if _PART in text:
                start = place if start is None else start
            elif start is not None:
                yield start, place
                start = None

    def _text(self, token_ids: Sequence[int]) -> str:
        text = self._decode(token_ids)
        return text[len(self._prefix) :] if text.startswith(self._prefix) else text

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode([*self._before, *token_ids], skip_special_tokens=False)

    def _first_known(self) -> list[int]:
        for text in _BEFORE:
            try:
                if len(ids := self._tokenizer.encode(text, add_special_tokens=False)):
                    return [int(token) for token in ids]
            except Exception:  # whatever a tokenizer raises that does not know a character
                continue
        return []


class RunTokenizers:
    """The tokenizers of runs, loaded when a sample is first looked at; several threads may ask."""

    def __init__(self) -> None:
        self._known: dict[Path, TokenTexts | None] = {}
        self._lock = threading.Lock()

    def begin(self, path: Path) -> None:
        """Have that of a run loaded by a thread that nobody waits for: one of its samples will be looked at next."""
        if path not in self._known and not is_evaluation(path):
            threading.Thread(target=self.of, args=(path,), name="tokenizer", daemon=True).start()

    def of(self, path: Path) -> TokenTexts | None:
        """Return that of a run; None where its model is not here, which is said once."""
        with self._lock:
            if path not in self._known:
                try:
                    self._known[path] = _load(path)
                except Exception as error:  # loading a tokenizer raises whatever its libraries do
                    _log.warning("%s: tokens are shown by number: no tokenizer (%s)", path, in_one_line(error))
                    self._known[path] = None
            return self._known[path]


def _load(path: Path) -> TokenTexts:
    # Imported here: seconds, which a page that shows no sample need not wait.
    from rollfeed.app.model import load_model_tokenizer
    from rollfeed.config.model import ModelSettings
    from rollfeed.prompts import load_tokenizer

    with RunReader(path) as reader:
        stored = reader.run().settings
    # No other settings: one that is a function, a file that has gone or of another version hides no tokens, and whoever
    # made the run may not have code of a model's folder run here.
    named = {key: value for key, value in stored.get("model", {}).items() if key in ("checkpoint", "tiny")}
    model = ModelSettings.model_validate(named)
    try:
        return TokenTexts(load_model_tokenizer(model, seed=stored.get("seed", 0)))
    except CheckpointError:
        if not (path / MODEL).is_dir():
            raise
        return TokenTexts(load_tokenizer(path / MODEL))  # of a finished training, which was copied here with its model
