"""Recounts the ledger and the numbers of a run from the groups that its files have.

One step is in memory at a time, and a byte a prompt that was drawn.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rollfeed.app.verifying.verification import Recounted, Verification
from rollfeed.batch import batch_metrics
from rollfeed.store import StepRecord
from rollfeed.types import Dropped, Group, LedgerCounts, RunState, TrainBatch

_TOLERANCE = 1e-9
"""Of numbers that another version of numpy may have added up in another order."""


class GroupRecount:
    """Follows a run's steps in order, and notes what does not add up."""

    def __init__(self, found: Verification, settings: Mapping[str, Any]) -> None:
        self._found = found
        self._reward_key = settings.get("reward", {}).get("reward_key")
        self._ended = bytearray()
        """Whether each prompt has ended, by group index."""
        self._before = LedgerCounts()

    def step(self, record: StepRecord, batch: TrainBatch, dropped: Sequence[Dropped]) -> None:
        self._found.num_samples += len(batch.samples)
        self._check_account(record, batch, dropped)
        self._check_metrics(record, batch)
        for group in (*batch.groups, *(each.group for each in dropped)):
            self._end(group, record.step)
        self._check_ledger(record, len(batch.groups), len(dropped))

    def finish(self, state: RunState, record: StepRecord) -> None:
        """Recount what the last step has left."""
        counts, step = record.ledger, record.step
        live = {"surplus": state.surplus, "requeued": state.requeued, "in_flight": state.in_flight}
        for name, groups in live.items():
            if len(groups) != getattr(counts, name):
                self._note(step, f"{len(groups)} prompts are {name}, the ledger has {getattr(counts, name)}")
        places = Counter(group.group_index for groups in live.values() for group in groups)
        for group_index, number in places.items():
            if number > 1 or self._has_ended(group_index):
                self._note(step, f"group {group_index} goes on, and has ended or is in two places")
        if state.ledger != counts:
            self._note(step, "the state has another ledger than the account")
        if state.next_group_index != counts.drawn:
            self._note(step, f"{state.next_group_index} prompts have numbers, {counts.drawn} were drawn")
        lost = counts.drawn - sum(self._ended) - len(places)
        if lost != counts.discarded:
            self._note(step, f"{lost} prompts are nowhere, {counts.discarded} were discarded")

    def _end(self, group: Group, step: int) -> None:
        if self._has_ended(group.group_index):
            self._note(step, f"group {group.group_index} ends a second time")
        missing = group.group_index + 1 - len(self._ended)
        self._ended.extend(bytes(max(0, missing)))
        self._ended[group.group_index] = 1

    def _has_ended(self, group_index: int) -> bool:
        return group_index < len(self._ended) and bool(self._ended[group_index])

    def _check_account(self, record: StepRecord, batch: TrainBatch, dropped: Sequence[Dropped]) -> None:
        counted = {
            "num_groups": len(batch.groups),
            "num_samples": len(batch.samples),
            "num_dropped": len(dropped),
            "response_tokens": sum(group.response_tokens for group in batch.groups),
            "drop_reasons": dict(Counter(each.reason for each in dropped)),
            "policy_version": batch.policy_version,
        }
        for name, value in counted.items():
            if (told := getattr(record, name)) != value:
                self._found.add(
                    Recounted.NUMBERS,
                    f"step {record.step}",
                    f"{name} is {told} in the account, and {value} in the files",
                    step=record.step,
                )

    def _check_metrics(self, record: StepRecord, batch: TrainBatch) -> None:
        metrics = batch_metrics(batch.groups, reward_key=self._reward_key, policy_version=batch.policy_version)
        for name in sorted(metrics.keys() & record.metrics.keys()):
            told, value = record.metrics[name], metrics[name]
            if not (math.isclose(told, value, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE) or not math.isfinite(value)):
                is_age = name.startswith("rollout/staleness")
                self._found.add(
                    Recounted.VERSIONS if is_age else Recounted.NUMBERS,
                    f"step {record.step}",
                    f"{name} is {told:g}, and {value:g} by the batch",
                    step=record.step,
                )

    def _check_ledger(self, record: StepRecord, num_kept: int, num_dropped: int) -> None:
        counts, before, step = record.ledger, self._before, record.step
        if not counts.balanced:
            self._note(step, f"{counts.drawn} prompts were drawn, and other numbers are in all places together")
        if (trained := counts.trained - before.trained) != num_kept:
            self._note(step, f"{trained} groups count as trained, {num_kept} are in the batch")
        ended = counts.dropped + counts.failed - before.dropped - before.failed
        if ended != num_dropped:
            self._note(step, f"{ended} groups count as dropped or failed, {num_dropped} are in the file")
        if counts.drawn < before.drawn or counts.discarded < before.discarded:
            self._note(step, "fewer prompts were drawn or discarded than a step before")
        self._before = counts

    def _note(self, step: int, detail: str) -> None:
        self._found.add(Recounted.LEDGER, f"step {step}", detail, step=step)
