"""slime's reward hub: graders of ours under its names."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rollfeed.answers import find_box
from rollfeed.compat.slime_plugins.shared_run import SlimeUseError, latest
from rollfeed.rewards.registry import BUILTIN_GRADERS
from rollfeed.types import Correct, Outcome, Verdict


async def async_rm(args: Any, sample: Any, **kwargs: Any) -> Any:
    """Score a sample by the ``rm_type`` of its metadata, or of the run.

    Raises:
        SlimeUseError: If there is no such grader, or grading failed.
    """
    del kwargs
    hub = latest().hub
    if hub is None:
        raise SlimeUseError("async_rm works while a run goes on")
    return await graded(hub, sample, rm_type=args.rm_type)


async def graded(hub: Any, sample: Any, **asked: Any) -> Any:
    """Return what a hub of ours gives a sample, by the ``rm_type`` of its metadata if it has one."""
    given = sample.metadata if isinstance(sample.metadata, dict) else {}
    metadata = {name: value for name, value in given.items() if value or name != "rm_type"}
    verdict = await hub.grade(sample.response, sample.label, metadata=metadata, prompt=sample.prompt, **asked)
    return _reward(verdict, str(metadata.get("rm_type") or asked.get("rm_type") or "rm_type"))


async def batched_async_rm(args: Any, samples: Sequence[Any], **kwargs: Any) -> list[Any]:
    """Score samples, each as :func:`async_rm`; of one that has forked, the last counts."""
    leaves = [each[-1] if isinstance(each, list) else each for each in samples]
    return list(await asyncio.gather(*(async_rm(args, sample, **kwargs) for sample in leaves)))


def _reward(verdict: Verdict, name: str) -> Any:
    if verdict.outcome is not Outcome.OK:
        raise SlimeUseError(f"{name}: {verdict.detail}")
    return verdict.reward


def _graded(rm_type: str, response: str, label: Any) -> Verdict:
    verdict = BUILTIN_GRADERS[rm_type](response, label, {})
    _reward(verdict, rm_type)
    return verdict


def grade_answer_verl(solution_str: str, ground_truth: Any) -> bool:
    """Whether the boxed answer is right."""
    return bool(ground_truth) and _graded("math", solution_str, ground_truth).correct is Correct.YES


def get_deepscaler_rule_based_reward(response: str, label: Any) -> int:
    """Return 1 for a right boxed answer after the reasoning, else 0."""
    return int(label not in ("", None) and _graded("deepscaler", response, label).correct is Correct.YES)


def compute_score(
    solution_str: str, ground_truth: Any, strict_box_verify: bool = False, **others: Any
) -> dict[str, Any]:
    """Return ``score`` (1 or -1), ``acc`` and ``pred`` of the last "Answer:" line, or of the box."""
    del others
    verdict = BUILTIN_GRADERS["dapo"](solution_str, ground_truth, {"strict_box": strict_box_verify})
    _reward(verdict, "compute_score")
    right = verdict.correct is Correct.YES
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": verdict.extracted or ""}


def extract_answer(passage: str) -> str | None:
    """Return the content of the last box."""
    return find_box(passage)
