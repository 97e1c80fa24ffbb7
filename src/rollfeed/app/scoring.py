"""Grades rows of a file, or of any list, without a run."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollfeed.app.rewards import REMOTE_RM_TYPE, num_cores, open_reward_hub
from rollfeed.config import RewardSettings
from rollfeed.errors import DataError, RunFailedError
from rollfeed.rewards import RewardHub
from rollfeed.types import Outcome, Verdict
from rollfeed.types.text import well_formed_json

_WINDOW_ROWS = 1_024
"""Rows that are under way or wait for an earlier one, so that results come in order."""


@dataclass(slots=True)
class ScoreCounts:
    """How far a file is graded."""

    total: int = 0
    graded: int = 0
    by_outcome: Counter[Outcome] = field(default_factory=Counter)
    seconds: float = 0.0


async def grade_rows(
    rows: Iterable[Mapping[str, Any]], settings: RewardSettings | None = None
) -> AsyncIterator[dict[str, Any]]:
    """Grade rows and give one result each, in order; several are graded at once.

    Args:
        rows: With ``rm_type``, ``response`` and ``label``; ``id``, ``metadata``, ``reward_key`` and ``prompt`` where
            there are any.
        settings: Of graders, workers, sandboxes and the reward server; its ``rm_type`` is for rows without one.

    Yields:
        ``id``, ``reward`` (None unless the outcome is ``ok``), ``outcome``, ``extracted``, ``seconds`` and ``detail``.
    """
    async with open_reward_hub(settings or RewardSettings()) as hub:
        grading = _Grading(hub, num_turns=num_cores())
        waiting: deque[asyncio.Task[dict[str, Any]]] = deque()
        try:
            for row in rows:
                waiting.append(asyncio.create_task(grading.grade(row)))
                if len(waiting) >= _WINDOW_ROWS:
                    yield await waiting.popleft()
            while waiting:
                yield await waiting.popleft()
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


async def score_file(
    path: Path,
    out: Path,
    *,
    settings: RewardSettings | None = None,
    progress: Callable[[ScoreCounts], None] | None = None,
) -> ScoreCounts:
    """Grade the rows of a JSONL file into another, which appears when it is complete.

    Args:
        path: As :func:`grade_rows` takes rows, one a line; blank lines do not count.
        out: Replaced when it exists.
        settings: As there.
        progress: Told after each row.

    Raises:
        DataError: If ``path`` is not such a file, or ``out`` cannot be made.
        RunFailedError: If ``out`` cannot be written to its end.
    """
    started = time.monotonic()
    _refuse_unless_plain(path, out)
    counts = ScoreCounts(total=await asyncio.to_thread(lambda: sum(1 for _ in read_rows(path))))
    with _Replacement(out) as file:
        async for result in grade_rows(read_rows(path), settings):
            file.write(json.dumps(result))
            counts.graded += 1
            counts.by_outcome[Outcome(result["outcome"])] += 1
            counts.seconds = time.monotonic() - started
            if progress is not None:
                progress(counts)
    return counts


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSONL file.

    Raises:
        DataError: If it cannot be read, or a line is no JSON object; the line is named.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _row(line.removeprefix(b"\xef\xbb\xbf"), f"{path}, line {number}")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}; name a JSONL file") from error


def _refuse_unless_plain(path: Path, out: Path) -> None:
    if path.exists() and not path.is_file():
        raise DataError(f"{path}: is not a plain file, and rows are read twice; save them to a file first")
    if out.exists() and path.exists() and path.samefile(out):
        raise DataError(f"{out}: is the file that is read; choose another --out")


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error}); each line must be one JSON object") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: a {type(row).__name__}; each line must be one JSON object")
    return well_formed_json(row)  # type: ignore[no-any-return]


class _Grading:
    """Grades as many rows at once as there are cores, so that a row's seconds are its own; servers have more."""

    def __init__(self, hub: RewardHub, *, num_turns: int) -> None:
        self._hub = hub
        self._turns = asyncio.Semaphore(num_turns)

    async def grade(self, row: Mapping[str, Any]) -> dict[str, Any]:
        if row.get("rm_type") == REMOTE_RM_TYPE:
            return await self._grade(row)
        async with self._turns:
            return await self._grade(row)

    async def _grade(self, row: Mapping[str, Any]) -> dict[str, Any]:
        started = time.monotonic()
        reward_key = row.get("reward_key")
        if reward_key is None or isinstance(reward_key, str):
            verdict = await self._hub.grade(
                row.get("response"),
                row.get("label"),
                rm_type=row.get("rm_type"),
                metadata=row.get("metadata"),
                reward_key=reward_key,
                prompt=row.get("prompt"),
            )
        else:
            detail = f"reward_key is {reward_key!r:.80}; it must be a text"
            verdict = Verdict(reward=None, outcome=Outcome.ERROR, detail=detail)
        return {
            "id": row.get("id"),
            "reward": verdict.reward,
            "outcome": verdict.outcome.value,
            "extracted": verdict.extracted,
            "seconds": round(time.monotonic() - started, 6),
            "detail": verdict.detail,
        }


class _Replacement:
    """A file that takes another's place when the block ends well, and is gone when it does not."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")

    def __enter__(self) -> _Replacement:
        if self._path.exists() and not self._path.is_file():
            raise DataError(f"{self._path}: is not a plain file; choose another --out")
        try:
            self._file = self._temporary.open("wb")
        except OSError as error:
            raise DataError(f"{self._path}: cannot be written: {error.strerror}; choose another --out") from error
        return self

    def write(self, line: str) -> None:
        """Add a line."""
        with self._told():
            self._file.write(line.encode() + b"\n")

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        try:
            if kind is None:
                with self._told():
                    self._file.flush()
                    os.fsync(self._file.fileno())
                    self._temporary.replace(self._path)
        finally:
            with suppress(OSError):  # what is still to be written is not wanted any more
                self._file.close()
            self._temporary.unlink(missing_ok=True)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunFailedError(f"{self._path}: cannot be written: {error.strerror}; choose another --out") from error
