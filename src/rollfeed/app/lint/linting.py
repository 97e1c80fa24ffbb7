"""Reads the samples of a path, and has them checked with what the policy was."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rollfeed.app.lint.second_scores import Chosen, SampledPolicy, rescore
from rollfeed.app.model import load_model, load_settings_model
from rollfeed.app.stored_run import stored_spec
from rollfeed.config import RolloutMode, Settings
from rollfeed.errors import CheckpointError, ConfigError
from rollfeed.gateway.session_journal import recorded_turns
from rollfeed.lint import Expected, Linter, Marks, Report, SamplePlace, Subject, read_subjects, sample_files
from rollfeed.prompts import load_tokenizer
from rollfeed.store import RunReader
from rollfeed.store.layout import JOURNAL
from rollfeed.store.tables.schema import from_row
from rollfeed.types import Prompt, SampleStatus


def lint(
    path: Path,
    *,
    tokenizer: Path | None = None,
    model: str | None = None,
    rescores: bool = True,
    on_progress: Callable[[Report], None] = lambda _: None,
) -> Report:
    """Check all samples at a path.

    ``tokenizer`` is a folder, where it is not the run's own; ``model`` a checkpoint with the weights that sampled, by
    default the run's own, for what its version 0 sampled; where nothing ``rescores``, none is needed.

    Raises:
        ConfigError: If there are no samples, or they cannot be read.
    """
    is_run = (path / JOURNAL).exists()
    policy = _run_policy(path) if is_run else SampledPolicy()
    if model is not None:
        policy = policy.with_model(load_model(model))
    settings, sampling = policy.settings, policy.sampling
    known, marks = load_tokenizer(tokenizer) if tokenizer else policy.tokenizer, None
    if known is not None:
        marks = Marks.of(known, stops=sampling.rollout_stop, stop_token_ids=sampling.rollout_stop_token_ids)
    expected = Expected(recorded=recorded_turns(path)) if settings is None else _expected(settings)
    linter, chosen = Linter(marks, expected), Chosen()
    for subject in _run_subjects(path, settings) if is_run else _file_subjects(path):
        turns = linter.check(subject)
        if rescores and turns is not None and turns.has_logprobs:
            chosen.add(subject, turns)
        on_progress(linter.report)
    report = linter.finish()
    if chosen.some or chosen.num_with_pictures:
        asyncio.run(rescore(report, chosen, policy, marks))
    return report


def _expected(settings: Settings) -> Expected:
    rollout = settings.rollout
    mask_type = rollout.loss_mask_type if rollout.mode is RolloutMode.SFT else None
    return Expected(response_limit=settings.sampling.rollout_max_response_len, mask_type=mask_type)


def _run_policy(path: Path) -> SampledPolicy:
    try:
        settings = stored_spec(path).settings
    except ConfigError:
        with RunReader(path):  # which is there, and from another version
            return SampledPolicy(reason="the run's settings are of another version; give --model")
    reasons = {
        "the policy is on servers": not settings.engine.is_embedded,
        "the policy was warmed up": settings.trains and settings.train.warm_up is not None,
    }
    reason = next((f"{why}; give --model" for why, is_so in reasons.items() if is_so), None)
    try:
        return SampledPolicy(settings=settings, model=load_settings_model(settings), reason=reason)
    except CheckpointError:
        return SampledPolicy(settings=settings, reason="the run's model is not here; give --model")


def _run_subjects(path: Path, settings: Settings | None) -> Iterator[Subject]:
    with RunReader(path) as reader:
        for record in reader.steps():
            yield from (_subject(row, settings) for row in reader.rows(record.step))


def _subject(row: Mapping[str, Any], settings: Settings | None) -> Subject:
    rollout = None if settings is None else settings.rollout
    drawn_from = row.get("sampling_mask_lengths")
    return Subject(
        place=SamplePlace(f"step {row['step']}", row["group_index"], row["rollout_id"], row["index"]),
        token_ids=row["token_ids"],
        response_length=row["response_length"],
        loss_mask=row["loss_mask"],
        logprobs=row["logprobs"],
        teacher_logprobs=row.get("teacher_logprobs"),
        spans=[(span["start"], span["end"], span["policy_version"]) for span in row["spans"]],
        newest_version=row["policy_version"],
        max_staleness=None if rollout is None else rollout.max_staleness,
        status=SampleStatus(row["status"]),
        prompt=from_row(Prompt, row),
        rollout=(row["group_index"], row["rollout_id"]),
        is_removed=bool(row.get("remove_sample")),
        is_taught=rollout is not None and rollout.mode is RolloutMode.SFT,
        metadata=json.loads(row["metadata"] or "{}"),
        sampling_mask=None if drawn_from is None else (drawn_from, row["sampling_mask_token_ids"]),
    )


def _file_subjects(path: Path) -> Iterator[Subject]:
    for file in sample_files(path):
        yield from read_subjects(file)
