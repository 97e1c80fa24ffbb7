"""Grades rows of a file, or of any list, without a run: by a hub, several at once, in order."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rollfeed.config import RewardSettings
from rollfeed.errors import DataError, RunFailedError
from rollfeed.rewards.hub import RewardHub
from rollfeed.rewards.registry import asks_server
from rollfeed.rewards.results import pick
from rollfeed.types import Correct, Outcome, Verdict
from rollfeed.types.text import well_formed_json

_WINDOW_ROWS = 1_024
"""Rows that are under way or wait for an earlier one, so that results come in order."""
_RIGHT = 1.0
"""The least reward of a row that is correct, where its verdict does not say."""


@dataclass(slots=True)
class GraderCounts:
    """The verdicts of one grader or function on the rows it scored, counted."""

    by_outcome: Counter[Outcome] = field(default_factory=Counter)
    reward_sum: float = 0.0
    num_correct: int = 0

    @property
    def reward_mean(self) -> float | None:
        """The mean over the rows that have a reward; None without any."""
        num_scored = self.by_outcome[Outcome.OK]
        return self.reward_sum / num_scored if num_scored else None

    @property
    def correct_ratio(self) -> float | None:
        """Share of the rows with a reward that are correct, as the verdict says, else by a reward of at least 1."""
        num_scored = self.by_outcome[Outcome.OK]
        return self.num_correct / num_scored if num_scored else None

    def add(self, verdict: Verdict) -> None:
        """Count a row, whose reward is one number."""
        self.by_outcome[verdict.outcome] += 1
        if isinstance(verdict.reward, float | int):
            says_nothing = verdict.correct is Correct.UNDEFINED
            self.reward_sum += verdict.reward
            self.num_correct += verdict.reward >= _RIGHT if says_nothing else verdict.correct is Correct.YES


@dataclass(slots=True)
class ScoreCounts:
    """The progress of the grading of a file."""

    total: int = 0
    graded: int = 0
    all: GraderCounts = field(default_factory=GraderCounts)
    by_grader: dict[str, GraderCounts] = field(default_factory=dict)
    """By the ``rm_type`` or the function that scored; the empty name is of rows that nothing could score."""
    seconds: float = 0.0

    @property
    def by_outcome(self) -> Counter[Outcome]:
        """Rows by outcome."""
        return self.all.by_outcome

    def add(self, scored_by: str, verdict: Verdict) -> None:
        self.graded += 1
        self.all.add(verdict)
        self.by_grader.setdefault(scored_by, GraderCounts()).add(verdict)


class Graded(NamedTuple):
    """A row that was graded."""

    id: Any
    scored_by: str
    """As in :attr:`ScoreCounts.by_grader`."""
    verdict: Verdict
    seconds: float

    def result(self) -> dict[str, Any]:
        """Return what is written of it; the reward is None unless the outcome is ``ok``."""
        verdict = self.verdict
        return {
            "id": self.id,
            "reward": verdict.reward,
            "outcome": verdict.outcome.value,
            "extracted": verdict.extracted,
            "seconds": self.seconds,
            "detail": verdict.detail,
        }


async def grade_all(
    rows: Iterable[Mapping[str, Any]],
    hub: RewardHub,
    *,
    settings: RewardSettings,
    function: str | None,
    own_verifiers: Collection[str],
    num_turns: int,
) -> AsyncGenerator[Graded, None]:
    """Grade rows, several at once, and yield what became of each, in order.

    Args:
        rows: With ``rm_type`` (or ``reward_fn``, a name of ``[reward.functions]``), ``response`` and ``label``; ``id``,
            ``metadata``, ``reward_key`` and ``prompt`` where there are any.
        hub: Grades them.
        settings: What it was made from.
        function: The name of its function for all rows that name none.
        own_verifiers: ``rm_type`` of rows that are not for the function.
        num_turns: Rows at once, so that a row's seconds are its own; those for a server do not count.
    """
    turns = asyncio.Semaphore(num_turns)

    async def grade(row: Mapping[str, Any]) -> Graded:
        metadata = _metadata(row)
        named = metadata if isinstance(metadata, Mapping) else {}
        # What the hub will choose.
        rm_type = named.get("rm_type", row.get("rm_type") or settings.rm_type)
        scored_by = str(named.get("reward_fn") or (rm_type not in own_verifiers and function) or rm_type or "")
        async with nullcontext() if asks_server(scored_by) else turns:
            started = time.monotonic()
            verdict = await _verdict(row, metadata, hub, reward_key=settings.reward_key)
            return Graded(row.get("id"), scored_by, verdict, round(time.monotonic() - started, 6))

    waiting: deque[asyncio.Task[Graded]] = deque()
    try:
        for row in rows:
            waiting.append(asyncio.create_task(grade(row)))
            if len(waiting) >= _WINDOW_ROWS:
                yield await waiting.popleft()
        while waiting:
            yield await waiting.popleft()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


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


def check_plain(path: Path, out: Path, *, is_folder: bool = False) -> None:
    """Refuse to read what cannot be read twice, and to write what is read. Raises DataError if it is so.

    ``is_folder`` says that the path may be a folder.
    """
    if path.exists() and not path.is_file() and not (is_folder and path.is_dir()):
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


async def _verdict(row: Mapping[str, Any], metadata: Any, hub: RewardHub, *, reward_key: str | None) -> Verdict:
    own_key = row.get("reward_key")
    if own_key is not None and not isinstance(own_key, str):
        return Verdict.failed(f"reward_key is {own_key!r:.80}; it must be a text")
    verdict = await hub.grade(
        row.get("response"),
        row.get("label"),
        rm_type=row.get("rm_type"),
        metadata=metadata,
        reward_key=own_key,
        prompt=row.get("prompt"),
    )
    # Where rewards are named numbers, the hub has seen to it that there is a key, and that they have it.
    return pick(verdict, str(own_key or reward_key))


def _metadata(row: Mapping[str, Any]) -> Any:
    """Return the metadata of a row, with its own ``reward_fn``; what is none is left for the hub to tell of."""
    metadata = row.get("metadata")
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except (ValueError, RecursionError):
            return row["metadata"]
    name = row.get("reward_fn")
    if name is None or not (metadata is None or isinstance(metadata, Mapping)):
        return metadata
    return {"reward_fn": name, **(metadata or {})}


class ResultFile:
    """A file that takes another's place when the block ends well, and is gone when it does not."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")

    def __enter__(self) -> ResultFile:
        if self._path.exists() and not self._path.is_file():
            raise DataError(f"{self._path}: is not a plain file; choose another --out")
        try:
            self._file = self._temporary.open("wb")
        except OSError as error:
            raise DataError(f"{self._path}: cannot be written: {error.strerror}; choose another --out") from error
        return self

    def write(self, line: str) -> None:
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
