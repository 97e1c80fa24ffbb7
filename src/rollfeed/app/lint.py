"""Lints what a run directory or a file of samples holds, with the tokenizer and the model that it was made with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from rollfeed.app.model import Model, build_engine, load_model, load_settings_model
from rollfeed.app.stored_run import stored_spec
from rollfeed.config import EngineSettings, RolloutMode, Settings
from rollfeed.errors import CheckpointError, ConfigError, EngineError
from rollfeed.lint import (
    Expected,
    Linter,
    Marks,
    OtherModelError,
    Report,
    Rescored,
    SamplePlace,
    Subject,
    compare,
    read_subjects,
    sample_files,
)
from rollfeed.lint.turns import Turns
from rollfeed.prompts import load_tokenizer
from rollfeed.protocols import OWN_CONTEXT, Engine, Tokenizer
from rollfeed.store import RunReader
from rollfeed.store.layout import JOURNAL
from rollfeed.store.tables.schema import from_row
from rollfeed.types import Prompt, SampleStatus

_MOST_SCORED, _MOST_SECONDS, _AT_A_TIME = 256, 20.0, 8
_TOLERANCE = {"fp32": 0.01, "int8": 0.05}
_OTHER_TOLERANCE = 0.1
"""Nats a token; what differs by ten times as much as the median token is allowed, too."""

Progress = Callable[[Report], None]


def lint(
    path: Path, *, tokenizer: Path | None = None, model: str | None = None, on_progress: Progress = lambda _: None
) -> Report:
    """Check all samples at a path.

    Args:
        path: A run directory, the folder of a gateway, or files of slime, prime-rl or verl.
        tokenizer: The folder of the policy's, where it is not the run's own.
        model: A checkpoint with the weights that sampled it; by default the run's own, for what its version 0 sampled.
        on_progress: Told of every sample.

    Raises:
        ConfigError: If there are no samples, or they cannot be read.
    """
    is_run = (path / JOURNAL).exists()
    own = _run_policy(path) if is_run else _Policy()
    given = None if model is None else load_model(model)
    chosen = load_tokenizer(tokenizer) if tokenizer else given.tokenizer if given else own.tokenizer
    settings = own.settings
    marks, expected = None, Expected()
    if settings is None:
        marks = None if chosen is None else Marks.of(chosen)
    else:
        sampling, rollout = settings.sampling, settings.rollout
        if chosen is not None:
            marks = Marks.of(chosen, stops=sampling.rollout_stop, stop_token_ids=sampling.rollout_stop_token_ids)
        mask_type = rollout.loss_mask_type if rollout.mode is RolloutMode.SFT else None
        expected = Expected(response_limit=sampling.rollout_max_response_len, mask_type=mask_type)
    linter, kept = Linter(marks, expected), _Kept()
    for subject in _run_subjects(path, settings) if settings else _file_subjects(path):
        turns = linter.check(subject)
        if turns is not None and turns.has_logprobs:
            kept.add(subject, turns)
        on_progress(linter.report)
    report = linter.finish()
    if kept.chosen and (given or own.reason is None):
        engine = build_engine(given, EngineSettings(context_length=kept.longest)) if given else own.engine()
        asyncio.run(_rescore(report, kept, engine, marks, own))
    elif kept.chosen:
        report.unchecked[f"logprobs against the model: {own.reason}"] += kept.num_seen
    return report


@dataclass(frozen=True, slots=True, kw_only=True)
class _Policy:
    """What sampled a run, as far as it is here."""

    settings: Settings | None = None
    model: Model | None = None
    reason: str | None = "give --model"
    """Why the run's logprobs are not computed again."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        return None if self.model is None else self.model.tokenizer

    @property
    def is_restricted(self) -> bool:
        return self.settings is not None and bool(self.settings.sampling.restrictions)

    @property
    def temperature(self) -> float:
        return 1.0 if self.settings is None else self.settings.sampling.rollout_temperature

    def engine(self) -> Engine:
        assert self.settings is not None
        assert self.model is not None
        return build_engine(self.model, self.settings.engine, deterministic=self.settings.rollout.deterministic)


def _run_policy(path: Path) -> _Policy:
    settings = stored_spec(path).settings
    sampling, train = settings.sampling, settings.train
    reasons = {
        "nothing was sampled": settings.rollout.mode is RolloutMode.SFT,
        "the policy is on servers; give --model": not settings.engine.is_embedded,
        "the policy was warmed up; give --model": settings.trains and train.warm_up is not None,
        "it has a repetition penalty": sampling.repetition_penalty != 1.0,
    }
    reason = next((why for why, is_so in reasons.items() if is_so), None)
    try:
        return _Policy(settings=settings, model=load_settings_model(settings), reason=reason)
    except CheckpointError:
        return _Policy(settings=settings, reason="the run's model is not here; give --model")


def _run_subjects(path: Path, settings: Settings) -> Iterator[Subject]:
    with RunReader(path) as reader:
        for record in reader.steps():
            before: Mapping[str, Any] | None = None
            for row in reader.rows(record.step):
                if before is not None:
                    is_plain = (row["group_index"], row["rollout_id"]) == (before["group_index"], before["rollout_id"])
                    yield _row_subject(before, settings, is_plain=is_plain)
                before = row
            if before is not None:
                yield _row_subject(before, settings, is_plain=False)


def _row_subject(row: Mapping[str, Any], settings: Settings, *, is_plain: bool) -> Subject:
    prompt = from_row(Prompt, row)
    drawn_from = row.get("sampling_mask_lengths")
    rollout = settings.rollout
    return Subject(
        place=SamplePlace(f"step {row['step']}", row["group_index"], row["rollout_id"], row["index"]),
        token_ids=row["token_ids"],
        response_length=row["response_length"],
        loss_mask=row["loss_mask"],
        logprobs=row["logprobs"],
        spans=[(span["start"], span["end"], span["policy_version"]) for span in row["spans"]],
        newest_version=row["policy_version"],
        max_staleness=rollout.max_staleness,
        status=SampleStatus(row["status"]),
        prompt=prompt,
        rollout=(row["group_index"], row["rollout_id"]),
        is_removed=bool(row["remove_sample"]),
        is_taught=rollout.mode is RolloutMode.SFT,
        has_own_context=OWN_CONTEXT in (row["metadata"] or ""),
        is_plain=is_plain,
        sampling_mask=None if drawn_from is None else (drawn_from, row["sampling_mask_token_ids"]),
    )


def _file_subjects(path: Path) -> Iterator[Subject]:
    for file in sample_files(path):
        yield from read_subjects(file)


class _Kept:
    """A few samples for the model, each as likely as the others; the draws are always the same."""

    def __init__(self) -> None:
        self.chosen: list[tuple[Subject, Turns]] = []
        self.num_seen = 0
        self._random = Random(0)

    @property
    def longest(self) -> int:
        return max(len(subject.tokens) for subject, _ in self.chosen) + 1

    def add(self, subject: Subject, turns: Turns) -> None:
        if subject.spans is not None and not any(version == 0 for _, _, version in subject.spans):
            return
        self.num_seen += 1
        if len(self.chosen) < _MOST_SCORED:
            self.chosen.append((subject, turns))
        elif (place := self._random.randrange(self.num_seen)) < _MOST_SCORED:
            self.chosen[place] = (subject, turns)


async def _rescore(report: Report, kept: _Kept, engine: Engine, marks: Marks | None, policy: _Policy) -> None:
    """Compare what is kept with what the engine says, for as long as that may take."""
    # Imported here because it brings torch, which is not needed where nothing is computed again.
    from rollfeed.engine.local import EmbeddedEngine

    assert isinstance(engine, EmbeddedEngine)
    started, scored = time.monotonic(), list[Rescored]()
    try:
        async with engine:
            for first in range(0, len(kept.chosen), _AT_A_TIME):
                some = kept.chosen[first : first + _AT_A_TIME]
                logprobs_N = await engine.score_tempered([each.tokens for each, _ in some], policy.temperature)
                ends = np.cumsum([len(subject.tokens) - 1 for subject, _ in some])
                for (subject, turns), whole in zip(some, np.split(logprobs_N, ends[:-1]), strict=True):
                    scored.append(_scored(subject, turns, whole))
                if time.monotonic() - started > _MOST_SECONDS:
                    break
        tolerance = _TOLERANCE.get(engine.precision, _OTHER_TOLERANCE)
        for found in compare(scored, tolerance=tolerance, is_restricted=policy.is_restricted, marks=marks):
            report.add(found)
    except (EngineError, OtherModelError, ConfigError) as error:
        report.unchecked[f"logprobs against the model: {error}"] += kept.num_seen
    else:
        if len(scored) < kept.num_seen:
            report.unchecked["logprobs against the model: a part is enough"] += kept.num_seen - len(scored)


def _scored(subject: Subject, turns: Turns, whole: np.ndarray) -> Rescored:
    logprobs = np.concatenate([[np.nan], whole])[len(whole) + 1 - subject.response_length :]
    known = turns.sampled.copy()
    for start, end, version in subject.spans or ():
        if version != 0:
            known[start:end] = False
    return Rescored(subject, logprobs, known)
