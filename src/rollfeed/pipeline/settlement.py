"""Checks what a rollout function returned, and books where every group of the step went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from rollfeed.errors import PromptsEndedError, RunFailedError
from rollfeed.pipeline.context import StepContext
from rollfeed.pipeline.groups.group_runner import START_ROLLOUT_ID
from rollfeed.pipeline.groups.in_flight import InFlight
from rollfeed.pipeline.ledger import Ledger, Place
from rollfeed.types import DroppedGroup, Group, PromptDraw, Rollout, RolloutOutput, Sample

FAILED_REASON = "failed"


def check_output(output: RolloutOutput, context: StepContext) -> None:
    """Refuse an output that would lose, double or invent a group.

    Raises:
        PromptsEndedError: If the batch is short because the source has ended.
        RunFailedError: If it does not hold exactly one batch of this step's groups, each once.
    """
    if not isinstance(output, RolloutOutput):
        raise RunFailedError(f"the rollout function returned {type(output).__name__}; it must return a RolloutOutput")
    if len(output.groups) < context.rollout_batch_size and context.source_ended:
        raise PromptsEndedError(
            f"step {context.step} has {len(output.groups)} of {context.rollout_batch_size} groups and the prompt "
            "source has ended"
        )
    if len(output.groups) != context.rollout_batch_size:
        raise RunFailedError(
            f"the rollout function returned {len(output.groups)} groups; a batch has {context.rollout_batch_size}"
        )
    times = Counter(group.group_index for _, group in _placed(output))
    known = context.draws.keys() | {group.group_index for group in context.surplus}
    for group_index, count in times.items():
        if count > 1:
            raise RunFailedError(f"the rollout function returned group {group_index} {count} times; each goes one way")
        if group_index not in known:
            raise RunFailedError(f"the rollout function returned group {group_index}, which is not of this step")


class Booked(NamedTuple):
    """What a step leaves besides its batch."""

    requeued: list[PromptDraw]
    wasted_tokens: dict[str, int]
    """By reason."""


def book(
    output: RolloutOutput, context: StepContext, *, ledger: Ledger, in_flight: InFlight, keep_partial: bool
) -> Booked:
    """Move every group of the step to its place, and forget those that are no longer under way.

    Args:
        output: Checked.
        context: What was drawn, and how it ended.
        ledger: Moved in.
        in_flight: Keeps what still runs, if the step was not ended.
        keep_partial: Whether groups that are requeued take along what they have.
    """
    wasted: Counter[str] = Counter()
    requeued: list[PromptDraw] = []
    named = set()
    for place, group in _placed(output):
        named.add(group.group_index)
        ledger.move(group.group_index, place)
        in_flight.remove(group.group_index)
        if place in (Place.DROPPED, Place.FAILED, Place.DISCARDED):
            wasted[place.value] += group.response_tokens
        elif place is Place.REQUEUED:
            wasted["stale"] += group.response_tokens
            requeued.append(PromptDraw(group.group_index, group.prompt))
    for group_index, draw in context.draws.items():
        if group_index in named or (group_index in in_flight and not context.is_ended):
            continue
        rest = context.rest(group_index)
        if not keep_partial:
            wasted["requeued"] += rest.response_tokens
            rest = draw._replace(rollouts=())
        requeued.append(with_start_rollout_id(rest, context.step))
        in_flight.remove(group_index)
        if ledger.place(group_index) is not Place.REQUEUED:
            ledger.move(group_index, Place.REQUEUED)
    return Booked(requeued, {reason: tokens for reason, tokens in sorted(wasted.items()) if tokens})


def with_start_rollout_id(draw: PromptDraw, step: int) -> PromptDraw:
    """Return the prompt with the step noted, once, in the metadata of every sample that has a response."""

    def noted(sample: Sample) -> Sample:
        if not sample.response_length or START_ROLLOUT_ID in sample.metadata:
            return sample
        return replace(sample, metadata={**sample.metadata, START_ROLLOUT_ID: step})

    def of(rollout: Rollout) -> Rollout:
        return replace(rollout, samples=tuple(noted(sample) for sample in rollout.samples))

    return draw._replace(rollouts=tuple(of(rollout) for rollout in draw.rollouts))


def dropped_groups(output: RolloutOutput) -> tuple[DroppedGroup, ...]:
    """Return filtered and failed groups alike, by group index."""
    failed = [DroppedGroup(group=result.group, reason=FAILED_REASON) for result in output.failed]
    return tuple(sorted([*output.dropped, *failed], key=lambda dropped: dropped.group.group_index))


def _placed(output: RolloutOutput) -> Iterator[tuple[Place, Group]]:
    yield from ((Place.TRAINED, group) for group in output.groups)
    yield from ((Place.DROPPED, dropped.group) for dropped in output.dropped)
    yield from ((Place.FAILED, result.group) for result in output.failed)
    yield from ((Place.SURPLUS, group) for group in output.surplus)
    yield from ((Place.DISCARDED, group) for group in output.discarded)
    yield from ((Place.REQUEUED, group) for group in output.stale)
