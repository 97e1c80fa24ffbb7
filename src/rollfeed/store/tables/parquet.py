"""Groups as Parquet files and back.

The same records give the same bytes: no times are written, rows keep the order of the batch, and
row groups end where groups of rollouts end, so that one group can be read without the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rollfeed.errors import RunDirectoryError
from rollfeed.store.json_text import to_json
from rollfeed.store.tables.columns import is_numbers, table_of
from rollfeed.store.tables.schema import (
    ADVANTAGES_OF_TOKENS,
    BATCH_SCHEMA,
    DROPPED_SCHEMA,
    SCHEMA_VERSION,
    TIMINGS_SCHEMA,
    with_sampling_masks,
)
from rollfeed.types import (
    Advantages,
    Correct,
    Dropped,
    Group,
    Outcome,
    Prompt,
    Reward,
    Rollout,
    Sample,
    SampleStatus,
    SamplingMask,
    TrainBatch,
    Verdict,
    VersionSpan,
    mean_reward,
)
from rollfeed.types.text import well_formed

Timings = Mapping[tuple[int, int | None, int | None], tuple[float, float, int]]
"""By (group index, rollout id, index): seconds, seconds outside generation, cached tokens."""


def batch_table(batch: TrainBatch, *, reward_key: str | None) -> pa.Table:
    """Return a batch as rows, one a sample.

    Raises:
        RunFailedError: If a label, metadata or message is not JSON.
    """
    common = {"step": batch.step, "policy_version": batch.policy_version}
    penalties_S = [None] * len(batch.samples) if batch.penalties_S is None else batch.penalties_S.tolist()
    rows = [
        {**common, **row, "advantage": advantage, "penalty": penalty}
        for row, advantage, penalty in zip(
            (row for group in batch.groups for row in _rows(group, reward_key)),
            batch.advantages_S,
            penalties_S,
            strict=True,
        )
    ]
    schema = BATCH_SCHEMA
    if isinstance(batch.advantages_S, tuple):
        schema = schema.set(schema.get_field_index("advantage"), ADVANTAGES_OF_TOKENS)
    return table_of(rows, with_sampling_masks(schema, rows))


def dropped_table(dropped: Sequence[Dropped], *, step: int, policy_version: int, reward_key: str | None) -> pa.Table:
    """Return dropped groups as rows; a rollout without samples, and a group without rollouts, has one row.

    Raises:
        RunFailedError: If a label, metadata or message is not JSON.
    """
    common = {"step": step, "policy_version": policy_version}
    rows = [
        {**common, **row, "advantage": None, "penalty": None, "drop_reason": well_formed(drop.reason)}
        for drop in dropped
        for row in _rows(drop.group, reward_key)
    ]
    return table_of(rows, with_sampling_masks(DROPPED_SCHEMA, rows))


def timings_table(groups: Sequence[Group]) -> pa.Table:
    """Return the times and cache counters of groups, one row for each of theirs in the other files."""
    rows = [
        {
            "group_index": group.group_index,
            "rollout_id": rollout.rollout_id if rollout else None,
            "index": sample.index if sample else None,
            "seconds": rollout.seconds if rollout else 0.0,
            "non_generation_seconds": sample.non_generation_seconds if sample else 0.0,
            "cached_tokens": sample.cached_tokens if sample else 0,
        }
        for group in groups
        for rollout, sample in _rollouts_and_samples(group)
    ]
    return table_of(rows, TIMINGS_SCHEMA)


def read_batch(path: Path, *, metrics: Mapping[str, float], timings: Timings) -> TrainBatch:
    """Return the batch of a file that is not empty.

    Raises:
        RunDirectoryError: If the file is missing, damaged or of another version.
    """
    with _explained(path):
        table = _read(path, None)
        groups = tuple(_group(rows, timings) for _, rows in _groups_of(table))
        return TrainBatch(
            step=table["step"][0].as_py(),
            policy_version=table["policy_version"][0].as_py(),
            groups=groups,
            advantages_S=_advantages(table["advantage"]),
            metrics=dict(metrics),
            penalties_S=_penalties(table),
        )


def read_groups(path: Path, *, group_index: int | None = None, timings: Timings) -> tuple[Group, ...]:
    """Return the groups of a batch file, or the one with ``group_index``, if it is there.

    Raises:
        RunDirectoryError: If the file is missing, damaged or of another version.
    """
    with _explained(path):
        return tuple(_group(rows, timings) for _, rows in _groups_of(_read(path, group_index)))


def read_dropped(path: Path, *, group_index: int | None = None, timings: Timings) -> tuple[Dropped, ...]:
    """Return the groups of a file of dropped groups, or the one with ``group_index``, if it is there.

    Raises:
        RunDirectoryError: If the file is missing, damaged or of another version.
    """
    with _explained(path):
        return tuple(
            Dropped(group=_group(rows, timings), reason=rows[0]["drop_reason"])
            for _, rows in _groups_of(_read(path, group_index))
        )


def read_columns(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of a file with a few of its columns, without reading the others.

    Raises:
        RunDirectoryError: If the file is missing, damaged or of another version.
    """
    with _explained(path):
        _check_version(path)
        rows: list[dict[str, Any]] = pq.read_table(path, columns=list(columns), partitioning=None).to_pylist()
        return rows


def read_timings(path: Path, *, group_index: int | None = None) -> Timings:
    """Return times and cache counters by row key.

    Raises:
        RunDirectoryError: If the file is missing, damaged or of another version.
    """
    with _explained(path):
        return {
            (row["group_index"], row["rollout_id"], row["index"]): (
                row["seconds"],
                row["non_generation_seconds"],
                row["cached_tokens"],
            )
            for row in _read(path, group_index).to_pylist()
        }


def _rows(group: Group, reward_key: str | None) -> Iterator[dict[str, Any]]:
    prompt_values = _prompt_values(group.prompt)
    for rollout, sample in _rollouts_and_samples(group):
        yield {
            "group_index": group.group_index,
            **prompt_values,
            **_rollout_values(rollout, sample),
            **_sample_values(sample, reward_key),
        }


def _rollouts_and_samples(group: Group) -> Iterator[tuple[Rollout | None, Sample | None]]:
    if not group.rollouts:
        yield None, None
    for rollout in group.rollouts:
        if not rollout.samples:
            yield rollout, None
        for sample in rollout.samples:
            yield rollout, sample


def _prompt_values(prompt: Prompt) -> dict[str, Any]:
    what = f"prompt {prompt.prompt_id}"
    messages, tools = prompt.messages, prompt.tools
    return {
        "prompt_id": well_formed(prompt.prompt_id),
        "source": well_formed(prompt.source),
        "prompt": well_formed(prompt.text),
        "prompt_token_ids": prompt.token_ids,
        "messages": None if messages is None else to_json([dict(m) for m in messages], f"{what}: messages"),
        "prompt_label": to_json(prompt.label, f"{what}: label"),
        "prompt_metadata": to_json(dict(prompt.metadata), f"{what}: metadata"),
        "tools": None if tools is None else to_json([dict(tool) for tool in tools], f"{what}: tools"),
        "prompt_images": [well_formed(image) for image in prompt.images],
    }


def _rollout_values(rollout: Rollout | None, sample: Sample | None) -> dict[str, Any]:
    verdict = rollout.verdict if rollout else None
    correct = verdict.correct if verdict else None
    if rollout and sample and len(rollout.samples) > 1 and correct:
        correct = sample.correct
    extracted = verdict.extracted if verdict else None
    error = rollout.error if rollout else None
    return {
        "rollout_id": rollout.rollout_id if rollout else None,
        "correct": correct.value if correct else None,
        "format_ok": verdict.format_ok if verdict else None,
        "extracted": None if extracted is None else well_formed(extracted),
        "outcome": verdict.outcome.value if verdict else None,
        "detail": well_formed(verdict.detail) if verdict else None,
        "error": None if error is None else well_formed(error),
    }


_SAMPLE_COLUMNS = (
    *("index", "token_ids", "response_length", "loss_mask", "logprobs", "spans", "status", "reward", "rewards"),
    *("response", "label", "metadata", "images", "precision", "remove_sample", "extra"),
    *("sampling_mask_lengths", "sampling_mask_token_ids"),
)


def _sample_values(sample: Sample | None, reward_key: str | None) -> dict[str, Any]:
    if sample is None:
        return {**dict.fromkeys(_SAMPLE_COLUMNS), "status": SampleStatus.FAILED.value}
    what, reward, mask = f"sample {sample.index}", sample.reward, sample.sampling_mask
    return {
        "index": sample.index,
        "token_ids": sample.token_ids,
        "response_length": sample.response_length,
        "loss_mask": sample.loss_mask,
        "logprobs": sample.logprobs,
        "spans": [span._asdict() for span in sample.version_spans],
        "status": sample.status.value,
        "reward": _reward_number(reward, reward_key),
        "rewards": to_json(reward, f"{what}: reward") if isinstance(reward, dict) else None,
        "response": well_formed(sample.response),
        "label": to_json(sample.label, f"{what}: label"),
        "metadata": to_json(dict(sample.metadata), f"{what}: metadata"),
        "images": [well_formed(image) for image in sample.images],
        "precision": sample.precision,
        "remove_sample": sample.remove_sample,
        "extra": to_json(dict(sample.extra), f"{what}: unknown keys") if sample.extra else None,
        "sampling_mask_lengths": None if mask is None else mask.lengths,
        "sampling_mask_token_ids": None if mask is None else mask.token_ids,
    }


def _reward_number(reward: Reward | None, reward_key: str | None) -> float | None:
    if isinstance(reward, dict):
        return None if reward_key is None else reward.get(reward_key)
    return None if reward is None else float(reward)


def _check_version(path: Path) -> None:
    version = (pq.read_schema(path).metadata or {}).get(b"rollfeed.schema")
    if version != str(SCHEMA_VERSION).encode():
        found = "no rollfeed.schema" if version is None else f"rollfeed.schema {version.decode()}"
        raise RunDirectoryError(f"{path}: has {found}, this rollfeed reads {SCHEMA_VERSION}")


def _read(path: Path, group_index: int | None) -> pa.Table:
    _check_version(path)
    filters = None if group_index is None else [("group_index", "=", group_index)]
    return pq.read_table(path, filters=filters, partitioning=None)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn whatever a missing, damaged or foreign file raises into one line."""
    try:
        yield
    except FileNotFoundError:
        raise RunDirectoryError(f"{path}: is missing; it was written once and has been removed since") from None
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, RunDirectoryError):
            raise
        reason = " ".join(str(error).split())
        raise RunDirectoryError(f"{path}: is damaged or not a file of rollfeed: {reason}") from error


def _groups_of(table: pa.Table) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    values = [
        [_array(scalar) for scalar in column] if is_numbers(column.type) else column.to_pylist()
        for column in table.columns
    ]
    rows = [dict(zip(table.column_names, row, strict=True)) for row in zip(*values, strict=True)]
    for group_index, members in groupby(rows, key=lambda row: int(row["group_index"])):
        yield group_index, list(members)


def _advantages(column: pa.ChunkedArray) -> Advantages:
    if is_numbers(column.type):
        return tuple(scalar.values.to_numpy(zero_copy_only=False).copy() for scalar in column)
    return np.array(column.to_pylist(), np.float32)


def _penalties(table: pa.Table) -> NDArray[np.float32] | None:
    """Return the penalties; None where there are none, or no such column, as in files of earlier versions."""
    is_without = "penalty" not in table.column_names or table["penalty"].null_count
    return None if is_without else np.array(table["penalty"].to_pylist(), np.float32)


def _array(scalar: pa.ListScalar) -> NDArray[Any] | None:
    # A copy: a view would keep the whole file's tokens in memory for one sample's.
    return scalar.values.to_numpy(zero_copy_only=False).copy() if scalar.is_valid else None


def _group(rows: Sequence[Mapping[str, Any]], timings: Timings) -> Group:
    first = rows[0]
    started = [row for row in rows if row["rollout_id"] is not None]
    rollouts = [_rollout(list(members), timings) for _, members in groupby(started, key=lambda row: row["rollout_id"])]
    return Group(
        group_index=first["group_index"],
        prompt=Prompt(
            prompt_id=first["prompt_id"],
            source=first["source"],
            text=first["prompt"],
            token_ids=first["prompt_token_ids"],
            messages=None if first["messages"] is None else tuple(json.loads(first["messages"])),
            label=json.loads(first["prompt_label"]),
            metadata=json.loads(first["prompt_metadata"]),
            tools=None if first["tools"] is None else tuple(json.loads(first["tools"])),
            images=tuple(first["prompt_images"]),
        ),
        rollouts=tuple(rollouts),
    )


def _rollout(rows: Sequence[Mapping[str, Any]], timings: Timings) -> Rollout:
    first = rows[0]
    samples = tuple(_sample(row, timings) for row in rows if row["index"] is not None)
    rewards = [sample.reward for sample in samples]
    outcome = None if first["outcome"] is None else Outcome(first["outcome"])
    verdict = None
    if outcome is not None and ((rewards and None not in rewards) or outcome is not Outcome.OK):
        verdict = Verdict(
            reward=mean_reward(rewards) if outcome is Outcome.OK else None,
            correct=Correct(rows[-1]["correct"]),
            format_ok=first["format_ok"],
            extracted=first["extracted"],
            outcome=outcome,
            detail=first["detail"],
        )
    seconds = timings.get((first["group_index"], first["rollout_id"], first["index"]), (0.0, 0.0, 0))[0]
    return Rollout(
        rollout_id=first["rollout_id"], samples=samples, verdict=verdict, error=first["error"], seconds=seconds
    )


def _sample(row: Mapping[str, Any], timings: Timings) -> Sample:
    _, elsewhere, cached = timings.get((row["group_index"], row["rollout_id"], row["index"]), (0.0, 0.0, 0))
    lengths, mask_ids = row.get("sampling_mask_lengths"), row.get("sampling_mask_token_ids")
    return Sample(
        token_ids=row["token_ids"],
        response_length=row["response_length"],
        loss_mask=row["loss_mask"],
        logprobs=row["logprobs"],
        version_spans=tuple(VersionSpan(**span) for span in row["spans"]),
        status=SampleStatus(row["status"]),
        group_index=row["group_index"],
        index=row["index"],
        rollout_id=row["rollout_id"],
        response=row["response"],
        label=json.loads(row["label"]),
        reward=row["reward"] if row["rewards"] is None else json.loads(row["rewards"]),
        metadata=json.loads(row["metadata"]),
        images=tuple(row["images"]),
        non_generation_seconds=elsewhere,
        cached_tokens=cached,
        precision=row["precision"],
        remove_sample=row["remove_sample"],
        extra={} if row["extra"] is None else json.loads(row["extra"]),
        correct=Correct.UNDEFINED if row["correct"] is None else Correct(row["correct"]),
        sampling_mask=None if lengths is None or mask_ids is None else SamplingMask(lengths, mask_ids),
    )
