"""Rewards that are sums of several scores.

Invariant: a sum is of all its parts; one that fails is the failure of the whole.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace

from rollfeed.config.mixture import MIXTURE_RM_TYPE, MixturePartSettings
from rollfeed.errors import suggestion
from rollfeed.rewards.calls import GroupGrader
from rollfeed.types import Correct, Outcome, Verdict

ScorePart = Callable[[MixturePartSettings], Awaitable[Verdict]]


async def mix(parts: Sequence[MixturePartSettings], score: ScorePart) -> Verdict:
    """Return the verdict of a mixture: every part by its key, and the weighted sum under ``mixture``.

    Whether the answer is right is what the first part says that calls answers right or wrong. A part that fails is the
    verdict, with its name; parts are scored at once, and the others' scores are then lost.
    """
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(_of_part(part, score)) for part in parts]
    verdicts = [task.result() for task in running]
    for part, verdict in zip(parts, verdicts, strict=True):
        if verdict.outcome is not Outcome.OK:
            return replace(verdict, detail=f"part {part.key!r} of the mixture: {verdict.detail}")
    scores = {part.key: verdict.reward for part, verdict in zip(parts, verdicts, strict=True)}
    numbers = {key: value for key, value in scores.items() if isinstance(value, float)}
    total = math.fsum(part.weight * numbers[part.key] for part in parts)
    judged = next((each for each in verdicts if each.correct is not Correct.UNDEFINED), verdicts[0])
    details = [f"{part.key}: {each.detail}" for part, each in zip(parts, verdicts, strict=True) if each.detail]
    return replace(
        judged,
        reward={**numbers, MIXTURE_RM_TYPE: total},
        format_ok=all(each.format_ok for each in verdicts),
        step_scores=next((each.step_scores for each in verdicts if each.step_scores), ()),
        detail="; ".join(details),
    )


def part_problem(
    parts: Sequence[MixturePartSettings],
    verifier: str | None,
    *,
    functions: Collection[str],
    graders: Mapping[str, object],
    of: Callable[[str], str | None],
) -> str | None:
    """Return why a part of the mixture, or the verifier, can score nothing; ``of`` says it of an ``rm_type``."""
    keys = [part.key for part in parts]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        return f"reward.mixture: {twice[0]!r} names two parts: give one of them another name"
    for part in parts:
        if part.function is not None and part.function not in functions:
            near = suggestion(part.function, functions, otherwise="name it in [reward.functions]")
            return f"reward.mixture: function = {part.function!r}: no such function; {near}"
        if isinstance(graders.get(part.rm_type or ""), GroupGrader):
            return f"reward.mixture: rm_type = {part.rm_type!r} compares the answers of a group, and a part scores each"
        if part.rm_type is not None and (problem := of(part.rm_type)):
            return f"reward.mixture: {problem}"
    problem = None if verifier is None else of(verifier)
    return problem and f"reward.verifier: {problem}"


async def _of_part(part: MixturePartSettings, score: ScorePart) -> Verdict:
    """Return a part's verdict with one number as its reward, or why there is none."""
    verdict = await score(part)
    if not isinstance(verdict.reward, dict):
        return verdict if verdict.reward is None else replace(verdict, reward=float(verdict.reward))
    if part.reward_key is None or part.reward_key not in verdict.reward:
        given = "no reward_key" if part.reward_key is None else f"reward_key = {part.reward_key!r}"
        return Verdict.failed(f"it has {given} and scores with the entries {sorted(verdict.reward)}: name one of them")
    return replace(verdict, reward=float(verdict.reward[part.reward_key]))
