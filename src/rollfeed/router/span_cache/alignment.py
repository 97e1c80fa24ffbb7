"""Finds the characters of a client's text that each token ends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollfeed.errors import ConfigError
from rollfeed.protocols import Tokenizer
from rollfeed.router.span_cache.token_runs import ENDED, PROMPT, TokenRun, packed_widths
from rollfeed.types import VersionSpan

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 8
"""Tokens that may make one piece of text together."""


class TextAligner:
    """Makes runs of tokens and their text, whatever the tokenizer leaves out, adds or changes.

    Where that cannot be seen token by token, several tokens have their text together, and are only used together.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.beginning = tokenizer.encode("", add_special_tokens=True).tolist()
        """Special tokens before a text."""
        # Alone, a token may lose its space.
        self._anchor = tokenizer.encode("a", add_special_tokens=False).tolist()
        self._anchor_size = len(tokenizer.decode(self._anchor, skip_special_tokens=False))
        self._pieces: dict[bool, dict[int, str]] = {False: {}, True: {}}

    def prompt(self, text: str, *, is_first: bool) -> TokenRun:
        """Return the tokens of a text; the first ones of a whole text have what the tokenizer puts before it."""
        try:
            ids_N, offsets_N2 = self._tokenizer.encode_with_offsets(text)
        except ConfigError:
            ids_N = self._tokenizer.encode(text, add_special_tokens=False)
            run = self.given(ids_N.tolist(), text)
        else:
            run = _run(ids_N, _widths(text, offsets_N2), text)
        num_before = len(self.beginning)
        if not is_first or not num_before or ids_N[:num_before].tolist() == self.beginning:
            return run
        return _before(self.beginning, run)

    def given(self, token_ids: Sequence[int], text: str) -> TokenRun:
        """Return tokens that came with a text, or as what they decode to."""
        widths, place = self._align(token_ids, text, skip_special_tokens=False)
        widths_N = np.zeros(len(token_ids), np.int64)
        widths_N[: len(widths)] = widths
        widths_N[-1:] += len(text[place:].encode())
        return _run(np.asarray(token_ids, np.int32), widths_N, text)

    def given_ids(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens that came without one; special tokens before it are not part of it."""
        num_before = len(self.beginning)
        if num_before and list(token_ids[:num_before]) == self.beginning:
            token_ids = token_ids[num_before:]
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def reply(
        self,
        token_ids: Sequence[int],
        logprobs_N: NDArray[np.float32],
        text: str | None,
        spans: Sequence[VersionSpan],
        *,
        skip_special_tokens: bool,
    ) -> list[TokenRun]:
        """Return the runs of a reply, one a version and what was not shown for itself; the last has the mark ``ENDED``.

        Args:
            token_ids: At least one.
            logprobs_N: Of them.
            text: As the client got it; None for what they decode to.
            spans: The versions that sampled them.
            skip_special_tokens: Whether the text is without these.
        """
        if text is None:
            text = self._decoded(token_ids, skip_special_tokens=skip_special_tokens)
        widths, place = self._align(token_ids, text, skip_special_tokens=skip_special_tokens)
        num_shown, rest = len(widths), text[place:].encode()
        tail = self._decoded(token_ids[num_shown:], skip_special_tokens=False).encode()
        if not tail.startswith(rest):
            tail = rest
        num_hidden = 0 if tail == rest else len(token_ids) - num_shown
        widths_N = np.zeros(len(token_ids), np.int64)
        widths_N[:num_shown] = widths
        widths_N[-1] += len(tail)
        data = text[:place].encode() + tail
        whole = _run(np.asarray(token_ids, np.int32), widths_N, data)._replace(logprobs=logprobs_N.tobytes())
        borders = sorted({span.end for span in spans} | ({num_shown} if num_hidden and num_shown else set()))
        runs: list[TokenRun] = []
        done = 0
        for border, version in ((border, _version_at(spans, border - 1)) for border in borders):
            first, whole = whole.cut(border - done) if border < len(token_ids) else (whole, whole)
            is_visible_end = border == num_shown and not rest
            is_end = border == len(token_ids) or (num_hidden > 0 and is_visible_end)
            runs.append(first._replace(version=version, marks=ENDED if is_end else 0))
            done = border
        if num_hidden:
            runs[-1] = runs[-1]._replace(num_shown=len(rest))
        return runs

    def _align(self, token_ids: Sequence[int], text: str, *, skip_special_tokens: bool) -> tuple[list[int], int]:
        """Return the widths of the first tokens, the last of which ends a character, and the characters they have."""
        pieces = [self._piece(token_id, skip_special_tokens=skip_special_tokens) for token_id in token_ids]
        if _INCOMPLETE not in text and "".join(pieces) == text:
            num_aligned = max((at for at, piece in enumerate(pieces, 1) if piece), default=0)
            return [len(piece.encode()) for piece in pieces[:num_aligned]], len(text)
        widths: list[int] = []
        place = begun = num_aligned = 0
        for at, piece in enumerate(pieces):
            widths.append(0)
            shown = piece
            if at - begun >= _LONGEST_CHARACTER:
                break
            if at > begun:
                shown = self._decoded(token_ids[begun : at + 1], skip_special_tokens=skip_special_tokens)
            if place == 0 and shown.startswith(" ") and not text.startswith(" "):
                shown = shown[1:]
            if not shown.endswith(_INCOMPLETE) and text.startswith(shown, place):
                widths[-1] = len(shown.encode())
                place += len(shown)
                begun = at + 1
                num_aligned = begun if shown else num_aligned
        rest = text[place:]
        for end in range(min(begun + _LONGEST_CHARACTER, len(widths)), begun, -1) if rest else ():
            if self._decoded(token_ids[begun:end], skip_special_tokens=False) == rest:  # half a character, for example
                widths[end - 1] = len(rest.encode())
                return widths[:end], len(text)
        return widths[:num_aligned], place

    def _piece(self, token_id: int, *, skip_special_tokens: bool) -> str:
        pieces = self._pieces[skip_special_tokens]
        piece = pieces.get(token_id)
        if piece is None:
            piece = pieces[token_id] = self._decoded([token_id], skip_special_tokens=skip_special_tokens)
        return piece

    def _decoded(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text = self._tokenizer.decode([*self._anchor, *token_ids], skip_special_tokens=skip_special_tokens)
        return text[self._anchor_size :]


def _run(ids_N: NDArray[np.int32], widths_N: NDArray[np.int64], text: str | bytes) -> TokenRun:
    data = text if isinstance(text, bytes) else text.encode()
    return TokenRun(ids_N.astype(np.int32).tobytes(), b"", packed_widths(widths_N), data, PROMPT)


def _before(token_ids: Sequence[int], run: TokenRun) -> TokenRun:
    """Return a run with tokens before it that have no text."""
    before = np.asarray(token_ids, np.int32).tobytes()
    zeros = bytes(len(before) // 4 * len(run.widths) // max(run.num_tokens, 1))
    return run._replace(ids=before + run.ids, widths=zeros + run.widths)


def _widths(text: str, offsets_N2: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bytes of a text that end with each of its tokens, from where these are in it, in characters."""
    if not len(offsets_N2):
        return np.empty(0, np.int64)
    starts_N, ends_N = offsets_N2[:, 0], offsets_N2[:, 1]
    # Tokens that share a character have it together.
    is_whole_N = np.append(starts_N[1:] >= ends_N[:-1], True)
    ends_N = np.maximum.accumulate(np.where(is_whole_N, ends_N, 0))
    ends_N[-1] = len(text)
    if not text.isascii():
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        sizes = 1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000).astype(np.int64)
        ends_N = np.concatenate([[0], sizes.cumsum()])[ends_N]
    return np.diff(ends_N, prepend=0)


def _version_at(spans: Sequence[VersionSpan], position: int) -> int:
    return next(span.policy_version for span in spans if position < span.end)
