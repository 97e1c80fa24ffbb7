"""Grades rows of a file, or of any list, without a run."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rollfeed.app.rewards import REMOTE_RM_TYPE, num_cores, open_reward_hub, own_verifiers
from rollfeed.config import PluginSettings, RewardSettings
from rollfeed.errors import DataError, RunFailedError
from rollfeed.rewards import RewardHub
from rollfeed.rewards.results import pick
from rollfeed.types import Correct, Outcome, Verdict
from rollfeed.types.text import well_formed_json

_WINDOW_ROWS = 1_024
"""Rows that are under way or wait for an earlier one, so that results come in order."""
_RIGHT = 1.0
"""The least reward of a row that is correct, where its verdict does not say."""


@dataclass(slots=True)
class GraderCounts:
    """What one grader or function has said of the rows it scored."""

    by_outcome: Counter[Outcome] = field(default_factory=Counter)
    reward_sum: float = 0.0
    num_correct: int = 0

    @property
    def reward_mean(self) -> float | None:
        """Of the rows that have a reward; None without any."""
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
    """How far a file is graded."""

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
        """Count a row."""
        self.graded += 1
        self.all.add(verdict)
        self.by_grader.setdefault(scored_by, GraderCounts()).add(verdict)


class _Graded(NamedTuple):
    result: dict[str, Any]
    scored_by: str
    verdict: Verdict


async def grade_rows(
    rows: Iterable[Mapping[str, Any]],
    settings: RewardSettings | None = None,
    *,
    functions: PluginSettings | None = None,
    folders: Sequence[Path] = (),
) -> AsyncIterator[dict[str, Any]]:
    """Grade rows and give one result each, in order; several are graded at once.

    Args:
        rows: With ``rm_type`` (or ``reward_fn``, a name of ``settings.functions``), ``response`` and ``label``; ``id``,
            ``metadata``, ``reward_key`` and ``prompt`` where there are any.
        settings: Of graders, workers, sandboxes and the reward server; its ``rm_type``, which may be a function as
            ``module:name``, is for rows without one.
        functions: Functions that score all other rows, as in training.
        folders: Where modules of functions are looked for.

    Yields:
        ``id``, ``reward`` (None unless the outcome is ``ok``), ``outcome``, ``extracted``, ``seconds`` and ``detail``.
    """
    async for graded in _grade_all(rows, settings or RewardSettings(), functions or PluginSettings(), folders):
        yield graded.result


async def _grade_all(
    rows: Iterable[Mapping[str, Any]], settings: RewardSettings, functions: PluginSettings, folders: Sequence[Path]
) -> AsyncGenerator[_Graded, None]:
    async with open_reward_hub(settings, functions=functions, folders=folders) as hub:
        grading = _Grading(hub, settings, function=functions.reward or functions.batched_reward, num_turns=num_cores())
        waiting: deque[asyncio.Task[_Graded]] = deque()
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
    functions: PluginSettings | None = None,
    folders: Sequence[Path] = (),
    progress: Callable[[ScoreCounts], None] | None = None,
) -> ScoreCounts:
    """Grade the rows of a JSONL file into another, which appears when it is complete.

    Args:
        path: As :func:`grade_rows` takes rows, one a line; blank lines do not count.
        out: Replaced when it exists.
        settings: As there.
        functions: As there.
        folders: As there.
        progress: Told after each row.

    Raises:
        DataError: If ``path`` is not such a file, or ``out`` cannot be made.
        PluginError: If a function cannot be imported or does not fit.
        RunFailedError: If ``out`` cannot be written to its end.
    """
    started = time.monotonic()
    _refuse_unless_plain(path, out)
    counts = ScoreCounts(total=await asyncio.to_thread(lambda: sum(1 for _ in read_rows(path))))
    with _Replacement(out) as file:
        grading = _grade_all(read_rows(path), settings or RewardSettings(), functions or PluginSettings(), folders)
        async with aclosing(grading):
            async for graded in grading:
                file.write(json.dumps(graded.result))
                counts.add(graded.scored_by, graded.verdict)
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

    def __init__(self, hub: RewardHub, settings: RewardSettings, *, function: str | None, num_turns: int) -> None:
        self._hub = hub
        self._settings = settings
        self._function = function
        self._own_verifiers = own_verifiers(overridden=settings.override_environments)
        self._turns = asyncio.Semaphore(num_turns)

    async def grade(self, row: Mapping[str, Any]) -> _Graded:
        metadata = _metadata(row)
        scored_by = self._scored_by(row, metadata if isinstance(metadata, Mapping) else {})
        if scored_by == REMOTE_RM_TYPE:
            return await self._grade(row, metadata, scored_by)
        async with self._turns:
            return await self._grade(row, metadata, scored_by)

    def _scored_by(self, row: Mapping[str, Any], metadata: Mapping[str, Any]) -> str:
        """Return what the hub will choose."""
        rm_type = metadata.get("rm_type", row.get("rm_type") or self._settings.rm_type)
        function = None if rm_type in self._own_verifiers else self._function
        return str(metadata.get("reward_fn") or function or rm_type or "")

    async def _grade(self, row: Mapping[str, Any], metadata: Any, scored_by: str) -> _Graded:
        started = time.monotonic()
        reward_key = row.get("reward_key")
        if reward_key is None or isinstance(reward_key, str):
            verdict = await self._hub.grade(
                row.get("response"),
                row.get("label"),
                rm_type=row.get("rm_type"),
                metadata=metadata,
                reward_key=reward_key,
                prompt=row.get("prompt"),
            )
            # Where rewards are named numbers, the hub has seen to it that there is a key, and that they have it.
            verdict = pick(verdict, str(reward_key or self._settings.reward_key))
        else:
            detail = f"reward_key is {reward_key!r:.80}; it must be a text"
            verdict = Verdict(reward=None, outcome=Outcome.ERROR, detail=detail)
        result = {
            "id": row.get("id"),
            "reward": verdict.reward,
            "outcome": verdict.outcome.value,
            "extracted": verdict.extracted,
            "seconds": round(time.monotonic() - started, 6),
            "detail": verdict.detail,
        }
        return _Graded(result, scored_by, verdict)


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
