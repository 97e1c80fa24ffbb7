"""The numbers of an evaluation, set by set, what of them is logged, and all answers as a table.

Invariants: an answer that could not be scored is in no number but the count of failures. A change is that of answers to
the same prompts; where the prompts are others, nothing is compared.

Axes: P prompts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from statistics import fmean, median
from typing import Any

import pyarrow as pa

from rollfeed.evaluation.paired import SetComparison, comparisons, outcomes_of_record
from rollfeed.evaluation.sets import EvalSet, SetPlan, what_is_asked
from rollfeed.evaluation.statistics import Interval, cluster_interval, pass_at_k, pass_hat_k, powers_of_two
from rollfeed.types import Correct, Group, Rollout, SampleStatus
from rollfeed.types.text import well_formed

_NO_NUMBERS = ("name", "groups", "right_P", "reward_key", "correct_threshold")


@dataclass(frozen=True, slots=True, kw_only=True)
class SetResult:
    """The numbers of one set, and the groups that they are of."""

    name: str
    num_prompts: int
    """Prompts whose answers are all scored; all other numbers are of these."""
    n_samples_per_prompt: int
    num_failed: int
    """Prompts with an answer that could not be made or scored."""
    first_failure: str | None
    num_over_length: int
    """Prompts left out because they are too long."""
    num_repeats: int = 0
    """Prompts left out because an earlier one asks the same."""
    num_missing: int = 0
    """Prompts that were asked for and are not there."""
    reward_mean: float | None
    """As all means, None where no prompt is scored."""
    accuracy: float | None
    """Share of right answers."""
    accuracy_interval: Interval
    """Of the accuracy, at 95 %, over prompts like these, answered so often."""
    pass_at_k: Mapping[int, float]
    """By k: the chance that one of k answers is right."""
    pass_hat_k: Mapping[int, float]
    """By k: the chance that all of k answers are right."""
    pass_at_k_interval: Mapping[int, Interval]
    """Of each ``pass_at_k``, at 95 %; ``pass_hat_k_interval`` of each ``pass_hat_k``."""
    pass_hat_k_interval: Mapping[int, Interval]
    truncated_ratio: float | None
    """Share of answers that ended at their length limit."""
    format_ok_ratio: float | None
    """Share of answers in which the grader found something to grade."""
    response_length_mean: float | None
    """In tokens."""
    response_length_median: float | None
    response_length_max: int | None
    groups: tuple[Group, ...]
    """By index, those with failures included."""
    right_P: tuple[int | None, ...]
    """Right answers to each prompt; None where one could not be scored. ``(P,)``, in the order of ``groups``."""
    reward_key: str | None
    correct_threshold: float

    def summary(self) -> dict[str, Any]:
        """Return the numbers as JSON values."""
        found: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "accuracy_interval":
                found |= {"accuracy_low": value.low, "accuracy_high": value.high}
            elif isinstance(value, Mapping):
                found[each.name] = {
                    str(k): list(of_k) if isinstance(of_k, tuple) else of_k for k, of_k in value.items()
                }
            elif each.name not in _NO_NUMBERS:
                found[each.name] = value
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """All sets, in the order of the settings."""

    sets: tuple[SetResult, ...]
    seed: int
    policy_versions: tuple[int, int]
    """The oldest and the newest that sampled an answer; equal unless weights changed meanwhile."""
    seconds: float
    num_tokens: int
    """Response tokens."""

    @property
    def accuracy(self) -> float | None:
        """The mean of the sets' accuracies, each counted once; None where no set has one."""
        return _mean([each.accuracy for each in self.sets if each.accuracy is not None])

    def metrics(self) -> dict[str, float]:
        """Return the numbers by name, as a tracker takes them: ``eval/<set>/<number>``."""
        found: dict[str, float] = {}
        for each in self.sets:
            numbers = {name: value for name, value in each.summary().items() if isinstance(value, int | float)}
            numbers |= {f"pass@{k}": value for k, value in each.pass_at_k.items()}
            numbers |= {f"pass^{k}": value for k, value in each.pass_hat_k.items()}
            #: eval/<set>/<number>: accuracy, reward, lengths and counts of a set, pass@k and pass^k
            found |= {f"eval/{each.name}/{name}": float(value) for name, value in numbers.items()}
        return found

    def summary(self) -> dict[str, Any]:
        """Return everything but the answers as JSON values."""
        return {
            "accuracy": self.accuracy,
            "seed": self.seed,
            "policy_versions": list(self.policy_versions),
            "num_tokens": self.num_tokens,
            "seconds": round(self.seconds, 3),
            "sets": {each.name: each.summary() for each in self.sets},
        }


def score_names(sets: Sequence[EvalSet]) -> list[str]:
    """Return the names of the numbers of an evaluation that are the higher, the better."""
    names = ["accuracy"]
    for each in sets:
        ks = powers_of_two(each.plan.n_samples_per_prompt)
        numbers = ["accuracy", "reward_mean", *(f"pass@{k}" for k in ks), *(f"pass^{k}" for k in ks)]
        names += [f"eval/{each.name}/{number}" for number in numbers]
    return names


def scores_of_record(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers that :func:`score_names` has, as a line of eval.jsonl has them; None is left out."""
    found: dict[str, Any] = {"accuracy": record.get("accuracy")}
    for name, numbers in record.get("sets", {}).items():
        found |= {f"eval/{name}/{number}": numbers.get(number) for number in ("accuracy", "reward_mean")}
        found |= {f"eval/{name}/pass@{k}": value for k, value in numbers.get("pass_at_k", {}).items()}
        found |= {f"eval/{name}/pass^{k}": value for k, value in numbers.get("pass_hat_k", {}).items()}
    return {name: value for name, value in found.items() if value is not None}


def is_right(rollout: Rollout, *, reward_key: str | None, threshold: float) -> bool:
    """Whether a scored answer is right: as the grader says, else by its reward."""
    if rollout.verdict is not None and rollout.verdict.correct is not Correct.UNDEFINED:
        return rollout.verdict.correct is Correct.YES
    return rollout.get_reward_value(reward_key) >= threshold


def summarise(eval_set: EvalSet, answered: Sequence[Group]) -> SetResult:
    """Return the numbers of a set whose groups are all complete."""
    plan, n = eval_set.plan, eval_set.plan.n_samples_per_prompt
    groups = [group for group in answered if group.is_finished]
    failures = [group.error for group in answered if not group.is_finished]
    answers = [rollout for group in groups for rollout in group.rollouts]
    right_P = tuple(_num_right(group, plan) for group in answered)
    scored_P = [right for right in right_P if right is not None]
    shares_P = [right / n for right in scored_P]
    ks = powers_of_two(n) if groups else ()
    at_k = {k: [pass_at_k(n, right, k) for right in scored_P] for k in ks}
    hat_k = {k: [pass_hat_k(n, right, k) for right in scored_P] for k in ks}
    lengths = [rollout.response_tokens for rollout in answers]
    return SetResult(
        name=eval_set.name,
        num_prompts=len(groups),
        n_samples_per_prompt=n,
        num_failed=len(failures),
        first_failure=failures[0] if failures else None,
        num_over_length=eval_set.num_over_length,
        num_repeats=eval_set.num_repeats,
        num_missing=eval_set.num_missing,
        reward_mean=_mean([float(each) for group in groups for each in group.reward_values(plan.reward_key)]),
        accuracy=_mean(shares_P),
        accuracy_interval=cluster_interval(shares_P, num_trials=n),
        pass_at_k={k: fmean(each) for k, each in at_k.items()},
        pass_hat_k={k: fmean(each) for k, each in hat_k.items()},
        pass_at_k_interval={k: cluster_interval(each, num_trials=n / k) for k, each in at_k.items()},
        pass_hat_k_interval={k: cluster_interval(each, num_trials=n / k) for k, each in hat_k.items()},
        truncated_ratio=_mean([float(rollout.status is SampleStatus.TRUNCATED) for rollout in answers]),
        format_ok_ratio=_mean([float(rollout.verdict is None or rollout.verdict.format_ok) for rollout in answers]),
        response_length_mean=_mean(lengths),
        response_length_median=median(lengths) if lengths else None,
        response_length_max=max(lengths, default=None),
        groups=tuple(answered),
        right_P=right_P,
        reward_key=plan.reward_key,
        correct_threshold=plan.correct_threshold,
    )


def _num_right(group: Group, plan: SetPlan) -> int | None:
    if not group.is_finished:
        return None
    return sum(
        is_right(rollout, reward_key=plan.reward_key, threshold=plan.correct_threshold) for rollout in group.rollouts
    )


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def log_record(result: EvalResult, *, step: int, first: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a line of eval.jsonl: the numbers, the change since ``first``, and the right answers to each prompt.

    ``first`` is the line of the first evaluation; None where this is it.
    """
    record: dict[str, Any] = {"step": step, **result.summary()}
    record["prompts"] = {each.name: {"digest": _digest(each), "right": list(each.right_P)} for each in result.sets}
    if first is None or "prompts" not in first:  # of a version that kept no answers
        return {**record, "change": {}}
    changes = comparisons(outcomes_of_record(first), outcomes_of_record(record))
    return {**record, "change": {each.name: _change(each, since=first["step"]) for each in changes}}


def _change(found: SetComparison, *, since: int) -> dict[str, Any]:
    low, high = found.interval
    about = {"since": since, "num_prompts": found.num_prompts, "accuracy": found.change}
    return {**about, "low": low, "high": high}


def _digest(found: SetResult) -> str:
    """Return what differs where a set asks something else, or in another order."""
    digest = blake2b(digest_size=8)
    for group in found.groups:
        for part in map(repr, what_is_asked(group.prompt)):
            digest.update(part.encode())
    return digest.hexdigest()


ANSWERS_SCHEMA = pa.schema(
    {
        **{"set": pa.string(), "index": pa.int64(), "answer": pa.int64(), "prompt_id": pa.string()},
        **{"prompt": pa.string(), "label": pa.string(), "response": pa.string(), "status": pa.string()},
        **{"response_length": pa.int64(), "reward": pa.float64(), "correct": pa.bool_()},
        **{"extracted": pa.string(), "error": pa.string(), "messages": pa.string()},
    }
)
"""``label`` and ``messages`` are JSON texts, the latter null where a prompt has none; ``reward`` and ``correct`` are
null where an answer could not be scored.
"""


def answers_table(result: EvalResult) -> pa.Table:
    """Return the answers ordered by set, index of the prompt and number of the answer."""
    rows = [row for each in result.sets for group in each.groups for row in _rows(each, group)]
    return pa.Table.from_pylist(rows, schema=ANSWERS_SCHEMA)


def _rows(found: SetResult, group: Group) -> Iterator[dict[str, Any]]:
    prompt = group.prompt
    for number, rollout in enumerate(group.rollouts):
        yield {
            "set": well_formed(found.name),
            "index": group.group_index,
            "answer": number,
            "prompt_id": well_formed(prompt.prompt_id),
            "prompt": well_formed(prompt.text),
            "label": json.dumps(prompt.label),
            "messages": None if prompt.messages is None else json.dumps(prompt.messages),
            **_answer(found, rollout),
        }


def _answer(found: SetResult, rollout: Rollout) -> dict[str, Any]:
    sample = rollout.samples[-1] if rollout.samples else None
    is_scored = bool(rollout.samples) and all(each.reward is not None for each in rollout.samples)
    extracted = rollout.verdict.extracted if rollout.verdict is not None else None
    correct = is_scored and is_right(rollout, reward_key=found.reward_key, threshold=found.correct_threshold)
    return {
        "response": None if sample is None else well_formed(sample.response),
        "status": (SampleStatus.FAILED if sample is None else sample.status).value,
        "response_length": rollout.response_tokens,
        "reward": rollout.get_reward_value(found.reward_key) if is_scored else None,
        "correct": correct if is_scored else None,
        "extracted": None if extracted is None else well_formed(extracted),
        "error": None if rollout.error is None else well_formed(rollout.error),
    }
