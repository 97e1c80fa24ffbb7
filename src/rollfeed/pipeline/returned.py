"""Checks what a rollout function returned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rollfeed.errors import PromptsEndedError
from rollfeed.faults import complaint
from rollfeed.pipeline.context import StepContext
from rollfeed.protocols import RolloutFn
from rollfeed.types import ByAge, Ending, Surplus, Trained

ROLLOUT_SETTING = "plugins.rollout"


def checked(returned: object, context: StepContext, rollout_fn: RolloutFn, *, before: Sequence[Ending]) -> list[Ending]:
    """Return the endings that a call of a rollout function gave, and those of surplus that it does not name.

    ``before`` is what earlier calls in the step gave.

    Raises:
        PromptsEndedError: If the batch is short because the source has ended.
        RunFailedError: If a group would be lost, doubled or invented, or there are not as many as were asked for.
    """
    if not isinstance(returned, Sequence) or not all(isinstance(each, Ending) for each in returned):
        told = f"returned {returned!r:.80}; it must return a list of endings, such as Trained(group)"
        raise complaint(ROLLOUT_SETTING, rollout_fn, told)
    num_trained, wanted = sum(isinstance(each, Trained) for each in returned), context.rollout_batch_size
    num_before = sum(isinstance(each, Trained) for each in before)
    if num_trained < wanted and context.source_ended:
        has, size = num_before + num_trained, num_before + wanted
        raise PromptsEndedError(f"step {context.step} has {has} of {size} groups and the prompt source has ended")
    if num_trained != wanted:
        told = f"{wanted} were missing" if num_before else f"a batch has {wanted}"
        raise complaint(ROLLOUT_SETTING, rollout_fn, f"returned {num_trained} groups; {told}")
    known = context.indices()
    counts = Counter(ending.group.group_index for ending in (*before, *returned))
    for ending in returned:
        group_index = ending.group.group_index
        if counts[group_index] > 1:
            told = f"returned group {group_index} {counts[group_index]} times; each goes one way"
            raise complaint(ROLLOUT_SETTING, rollout_fn, told)
        if group_index not in known:
            told = f"returned group {group_index}, which is not of this step"
            raise complaint(ROLLOUT_SETTING, rollout_fn, told)
    return [*returned, *(Surplus(group) for group in context.surplus if group.group_index not in counts)]


def too_old(context: StepContext, cut: ByAge, num_in_vain: int, num_submitted: int, max_staleness: int | None) -> str:
    """Return why a step fails whose rollout function returns nothing, or too little, that is new enough."""
    old = [ending.group for ending in cut.old]
    named = ", ".join(f"group {each.group_index} has version {each.oldest_trained_version}" for each in old[:3])
    more = f" and {len(old) - 3} more are too old" if len(old) > 3 else ""
    how = "nothing new enough twice in a row" if num_in_vain == 2 else "too little that is new enough"
    return (
        f"step {context.step}: after {num_submitted} prompts the rollout function has returned {how}: {named}{more}, "
        f"the engine has version {context.policy_version} and rollout.max_staleness is {max_staleness}: update "
        "the weights between the steps, or raise rollout.max_staleness"
    )
