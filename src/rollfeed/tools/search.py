"""The tool ``search``: the passages of a local corpus that fit a query best, ranked by BM25."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from rollfeed.config.tools import SearchToolSettings
from rollfeed.errors import ConfigError, ToolError

_TEXTS = ("text", "contents", "content")
"""Keys of a row with the passage; the first that is there counts."""
_PASSAGE_CHARS = 1_000
_MAX_QUERY_CHARS = 2_000


class SearchTool:
    """Fits :class:`rollfeed.protocols.Tool`; the corpus is read once a process, and indexed when it is first asked.

    The corpus is a JSONL file of passages, or a folder of texts.

    Raises:
        ConfigError: If there is no such corpus, or bm25s is not installed.
    """

    name = "search"
    description = "Searches a collection of texts and returns the passages that fit the query best."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "Words that the passage should have"}},
        "required": ["query"],
        "additionalProperties": False,
    }
    is_idempotent = True

    def __init__(self, corpus: Path, settings: SearchToolSettings) -> None:
        if not corpus.exists():
            raise ConfigError(f"tools.search.corpus = {str(corpus)!r}: no such file or folder")
        self._corpus = _corpus(corpus.resolve(), corpus.stat().st_mtime_ns)
        self._settings = settings

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Return the best passages, each with its title. Raises ToolError if none has a word of the query."""
        query: str = arguments["query"][:_MAX_QUERY_CHARS]
        found = await asyncio.to_thread(self._corpus.find, query, self._settings.num_results)
        if not found:
            raise ToolError(f"nothing was found for {query!r:.100}: try other words")
        limit = self._settings.max_passage_chars
        return "\n\n".join(f"[{number}] {title}\n{text[:limit]}" for number, (title, text) in enumerate(found, 1))


class _Corpus:
    """Titles and passages, and their index."""

    def __init__(self, passages: list[tuple[str, str]]) -> None:
        try:
            import bm25s
        except ModuleNotFoundError:
            raise ConfigError("the tool search needs bm25s: pip install 'rollfeed[tools]'") from None
        self._bm25s = bm25s
        self._passages = passages
        self._lock = Lock()
        self._index: Any = None

    def find(self, query: str, count: int) -> list[tuple[str, str]]:
        words = self._words([query])
        if not words.vocab:
            return []
        with self._lock:
            if self._index is None:
                self._index = self._bm25s.BM25()
                self._index.index(
                    self._words([f"{title} {text}" for title, text in self._passages]), show_progress=False
                )
        count = min(count, len(self._passages))
        places, scores = self._index.retrieve(words, k=count, show_progress=False)
        return [self._passages[int(place)] for place, score in zip(places[0], scores[0], strict=True) if score > 0.0]

    def _words(self, texts: list[str]) -> Any:
        return self._bm25s.tokenize(texts, stopwords="en", show_progress=False)


@lru_cache(maxsize=4)
def _corpus(path: Path, changed_at: int) -> _Corpus:
    """Return the corpus of a file or folder that was changed last at a time, in nanoseconds."""
    del changed_at
    passages = list(_of_folder(path) if path.is_dir() else _of_rows(path))
    if not passages:
        raise ConfigError(f"tools.search.corpus = {str(path)!r}: no text in it; it needs .txt or .md files, or rows")
    return _Corpus(passages)


def _of_folder(folder: Path) -> Iterator[tuple[str, str]]:
    for file in sorted(path for path in folder.rglob("*") if path.suffix in (".txt", ".md") and path.is_file()):
        passage = ""
        for paragraph in file.read_text(encoding="utf-8", errors="replace").split("\n\n"):
            if passage and len(passage) + len(paragraph) > _PASSAGE_CHARS:
                yield str(file.relative_to(folder)), passage
                passage = ""
            passage = f"{passage}\n\n{paragraph}".strip()
        if passage:
            yield str(file.relative_to(folder)), passage


def _of_rows(file: Path) -> Iterator[tuple[str, str]]:
    try:
        # Texts may have breaks of other kinds within them, which end no row.
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"tools.search.corpus = {str(file)!r}: cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{file}, line {number}: not JSON: {error}") from error
        texts = [row[key] for key in _TEXTS if isinstance(row.get(key), str)] if isinstance(row, dict) else []
        if not texts:
            raise ConfigError(f"{file}, line {number}: no text: a row needs a key {_TEXTS[0]!r}")
        yield str(row.get("title") or row.get("id") or number), texts[0]
