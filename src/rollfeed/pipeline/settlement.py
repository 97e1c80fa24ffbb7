"""Checks what a rollout function returned, and books where every group of the step went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rollfeed.errors import PromptsEndedError
from rollfeed.faults import complaint
from rollfeed.pipeline.context import StepContext
from rollfeed.pipeline.groups.in_flight import InFlight
from rollfeed.pipeline.ledger import Ledger, Place
from rollfeed.protocols import RolloutFn
from rollfeed.types import OVER_SAMPLED, STALE, ByAge, DroppedGroup, Group, RolloutOutput

ROLLOUT_SETTING = "plugins.rollout"
FAILED_REASON = "failed"
WITHOUT_FILTER = (OVER_SAMPLED, STALE)
"""Reasons of dropped groups that no group filter gave."""


def too_old(context: StepContext, cut: ByAge, num_in_vain: int, policy_version: int, max_staleness: int | None) -> str:
    """Return why a step fails whose rollout function returns nothing, or too little, that is new enough."""
    old = [*cut.requeued, *(dropped.group for dropped in cut.dropped)]
    named = ", ".join(f"group {each.group_index} has version {each.oldest_trained_version}" for each in old[:3])
    more = f" and {len(old) - 3} more are too old" if len(old) > 3 else ""
    how = "nothing new enough twice in a row" if num_in_vain == 2 else "too little that is new enough"
    return (
        f"step {context.step}: after {context.num_submitted} prompts the rollout function has returned {how}: "
        f"{named}{more}, the engine has version {policy_version} and rollout.max_staleness is {max_staleness}: update "
        "the weights between the steps, or raise rollout.max_staleness"
    )


def joined(before: RolloutOutput, output: RolloutOutput, context: StepContext, rollout_fn: RolloutFn) -> RolloutOutput:
    """Return what the calls of a rollout function gave together; refuse what would lose, double or invent a group.

    Args:
        before: What earlier calls in the step gave.
        output: What this call returned.
        context: With what it was called; surplus that it does not name stays surplus.
        rollout_fn: The function, for errors.

    Raises:
        PromptsEndedError: If the batch is short because the source has ended.
        RunFailedError: If it does not hold exactly the groups that were asked for, of this step and each once.
    """
    if not isinstance(output, RolloutOutput):
        told = f"returned {type(output).__name__}; it must return a RolloutOutput"
        raise complaint(ROLLOUT_SETTING, rollout_fn, told)
    if len(output.groups) < context.rollout_batch_size and context.source_ended:
        has, size = len(before.groups) + len(output.groups), len(before.groups) + context.rollout_batch_size
        raise PromptsEndedError(f"step {context.step} has {has} of {size} groups and the prompt source has ended")
    if len(output.groups) != context.rollout_batch_size:
        size = context.rollout_batch_size
        wanted = f"{size} were missing" if before.groups else f"a batch has {size}"
        raise complaint(ROLLOUT_SETTING, rollout_fn, f"returned {len(output.groups)} groups; {wanted}")
    named, known = indices(output), context.draws.keys() | {group.group_index for group in context.surplus}
    unnamed = tuple(group for group in context.surplus if group.group_index not in named)
    whole = RolloutOutput(
        groups=(*before.groups, *output.groups),
        dropped=(*before.dropped, *output.dropped),
        failed=(*before.failed, *output.failed),
        surplus=(*output.surplus, *unnamed),
        discarded=(*before.discarded, *output.discarded),
    )
    for group_index, count in Counter(group.group_index for _, group in _placed(whole)).items():
        if count > 1:
            told = f"returned group {group_index} {count} times; each goes one way"
            raise complaint(ROLLOUT_SETTING, rollout_fn, told)
    if unknown := named - known:
        told = f"returned group {min(unknown)}, which is not of this step"
        raise complaint(ROLLOUT_SETTING, rollout_fn, told)
    return whole


def indices(output: RolloutOutput) -> set[int]:
    """Return the indices of all groups that an output names."""
    return {group.group_index for _, group in _placed(output)}


def book(output: RolloutOutput, context: StepContext, *, ledger: Ledger, in_flight: InFlight) -> None:
    """Move every group that an output names to its place, and count what is wasted with it."""
    for place, group in _placed(output):
        ledger.move(group.group_index, place)
        in_flight.remove(group.group_index)
    for dropped in output.dropped:
        reason = dropped.reason if dropped.reason in WITHOUT_FILTER else Place.DROPPED.value
        context.wasted_tokens[reason] += dropped.group.response_tokens
    for result in output.failed:
        context.wasted_tokens[Place.FAILED.value] += result.group.response_tokens
    for group in output.discarded:
        context.wasted_tokens[Place.DISCARDED.value] += group.response_tokens


def dropped_groups(output: RolloutOutput) -> tuple[DroppedGroup, ...]:
    """Return filtered and failed groups alike, by group index."""
    failed = [DroppedGroup(group=result.group, reason=FAILED_REASON) for result in output.failed]
    return tuple(sorted([*output.dropped, *failed], key=lambda dropped: dropped.group.group_index))


def wasted_tokens(context: StepContext) -> dict[str, int]:
    """Return the tokens of a step that will not be trained on, by reason."""
    return {reason: tokens for reason, tokens in sorted(context.wasted_tokens.items()) if tokens}


def step_metrics(output: RolloutOutput, context: StepContext) -> dict[str, float]:
    """Return how many groups of a step went where, and which tokens were wasted, as flat ``rollout/...`` numbers."""
    reasons = Counter(dropped.reason for dropped in output.dropped)
    return {
        "rollout/groups_submitted": float(context.num_submitted),
        "rollout/groups_dropped": float(len(output.dropped)),
        "rollout/groups_over_sampled": float(reasons[OVER_SAMPLED]),
        "rollout/groups_failed": float(len(output.failed)),
        "rollout/groups_surplus": float(len(output.surplus)),
        "rollout/groups_stale": float(context.num_stale + reasons[STALE]),
        "rollout/groups_discarded": float(len(output.discarded)),
        "rollout/groups_requeued": float(context.num_requeued),
        **{
            f"rollout/dynamic_filter/drop_{reason}": float(count)
            for reason, count in reasons.items()
            if reason not in WITHOUT_FILTER
        },
        **{f"rollout/wasted_tokens/{reason}": float(tokens) for reason, tokens in wasted_tokens(context).items()},
    }


def _placed(output: RolloutOutput) -> Iterator[tuple[Place, Group]]:
    yield from ((Place.TRAINED, group) for group in output.groups)
    yield from ((Place.DROPPED, dropped.group) for dropped in output.dropped)
    yield from ((Place.FAILED, result.group) for result in output.failed)
    yield from ((Place.SURPLUS, group) for group in output.surplus)
    yield from ((Place.DISCARDED, group) for group in output.discarded)
