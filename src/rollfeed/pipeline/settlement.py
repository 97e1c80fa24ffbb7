"""Checks what a rollout function returned, and books where every group of the step went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rollfeed.errors import RunFailedError
from rollfeed.pipeline.context import StepContext
from rollfeed.pipeline.ledger import Ledger, Place
from rollfeed.types import DroppedGroup, Group, PromptDraw, RolloutOutput

FAILED_REASON = "failed"


def check_output(output: RolloutOutput, context: StepContext) -> None:
    """Refuse an output that would lose, double or invent a group.

    Raises:
        RunFailedError: If it does not hold exactly one batch of this step's groups, each once.
    """
    if not isinstance(output, RolloutOutput):
        raise RunFailedError(f"the rollout function returned {type(output).__name__}; it must return a RolloutOutput")
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


def book(output: RolloutOutput, context: StepContext, ledger: Ledger) -> tuple[list[PromptDraw], dict[str, int]]:
    """Move every group of the step to its place; return what is to be requeued, and wasted tokens by reason."""
    wasted: Counter[str] = Counter()
    named = set()
    for place, group in _placed(output):
        named.add(group.group_index)
        ledger.move(group.group_index, place)
        if place in (Place.DROPPED, Place.FAILED, Place.DISCARDED):
            wasted[place.value] += group.response_tokens
    requeued = [draw for index, draw in context.draws.items() if index not in named]
    for draw in requeued:
        result = context.result(draw.group_index)
        if result is not None:
            wasted["requeued"] += result.group.response_tokens
        if ledger.place(draw.group_index) is not Place.REQUEUED:
            ledger.move(draw.group_index, Place.REQUEUED)
    return requeued, {reason: tokens for reason, tokens in sorted(wasted.items()) if tokens}


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
