"""Advice on a run: what its numbers say is going wrong, since when, and which setting changes it.

A rule looks at the last steps of a run and speaks only where a condition holds there, so that what has passed is not
told. Thresholds are those of docs/runs.md, and deliberately far from what healthy runs show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from rollfeed.config.settings import flatten
from rollfeed.report.reward_advice import reward_signs
from rollfeed.types.text import counted

_Record = Mapping[str, Any]
_STREAK = 3
"""Steps in a row, up to the last one, that a condition has to hold in."""
_WINDOW = 5
"""Last steps over which what happens now and then is summed."""
_LONG = 20
"""Steps that a training has to have before it is said not to learn."""
_EQUAL = 1e-9  # a standard deviation within groups
_TRUNCATED = _EMPTY = 0.5
_SHORT = 32  # tokens
_DROPPED = 0.75
_REWARD_ERRORS = 0.05
_FAILED = 0.2
_WASTED = 0.3
_IDLE = 0.4
_ENTROPY, _ENTROPY_LEFT = 0.05, 0.1  # nats, and the share of the first
_SOLVED, _EVALUATIONS = 0.9, 4
_RISEN = 0.05  # of an accuracy; intervals of few prompts have 0 in them after a large rise, too
_EXPECTED = 20  # groups by weight

_ZERO_STD = "rollout/dynamic_filter/drop_zero_std_"
_WASTED_TOKENS = "rollout/wasted_tokens/"
_WASTE = {
    "over_sampled": ("filters.over_sampling.num_extra", "have fewer groups beyond the batch"),
    "discarded": ("rollout.surplus", "keep groups for the next step with keep"),
    "requeued": ("rollout.mode", "go on from the tokens of aborted answers with partial"),
    "stale": ("rollout.max_staleness", "allow older groups, or train faster"),
}
_OVER_SAMPLING = ("rollout.over_sampling_batch_size", "rollout.over_sampling_factor")
_REWARDS = ("plugins.reward", "plugins.batched_reward", "plugins.group_reward", "reward.rm_type")
_OTHERS = {
    "easy": "prompts are too easy; ask harder ones",
    "hard": "prompts are too hard, or the grader misses answers (`show DIR --wrong`); ask easier ones",
    "unknown": "prompts are too easy or too hard; ask others",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One thing that goes wrong in a run, and the setting that changes it."""

    name: str
    """Of the rule, for scripts."""
    setting: str
    """Dotted key of the setting to change; list entries by number."""
    first_step: int
    last_step: int
    """The last step that it is seen in."""
    text: str
    """What was seen and what to do, in one line, with the setting."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """All that rules look at; records in the order of steps."""

    settings: Mapping[str, Any]
    """By dotted key."""
    metrics: Sequence[_Record]
    trained: Sequence[_Record]
    evaluations: Sequence[_Record]
    found: list[Advice] = field(default_factory=list)

    def tell(self, name: str, records: Sequence[_Record], setting: str, seen: str, remedy: str) -> None:
        """Add an advice; in ``seen`` stands {steps} where these are told."""
        first, last = records[0]["step"], records[-1]["step"]
        steps = counted(last - first + 1, "step") + (f" ({first} to {last})" if last > first else f" ({first})")
        text = f"{seen.replace('{steps}', steps)}: {remedy}: {setting}"
        current = self.settings.get(setting)
        if current is not None and not isinstance(current, list | tuple | dict):
            text += f" (now {current})"
        self.found.append(Advice(name=name, setting=setting, first_step=first, last_step=last, text=text))


@dataclass(frozen=True, slots=True)
class _Limit:
    """A rule for a number of updates that a threshold bounds in each of the last steps."""

    name: str
    metrics: tuple[str, ...]
    """Names whose sum is looked at."""
    least: float
    """From where it is told."""
    setting: str
    seen: str
    """Has {value} where the mean of these steps stands."""
    remedy: str

    def __call__(self, seen: _Seen) -> None:
        streak = _last(seen.trained, lambda each: _total([each], *self.metrics) >= self.least)
        if len(streak) >= _STREAK:
            told = self.seen.replace("{value}", f"{_total(streak, *self.metrics) / len(streak):.2g}")
            seen.tell(self.name, streak, self.setting, told, self.remedy)


def advice_of(
    *,
    settings: Mapping[str, Any],
    metrics: Iterable[_Record],
    trained: Iterable[_Record] = (),
    evaluations: Iterable[_Record] = (),
) -> tuple[Advice, ...]:
    """Return what the records of a run say of it, the gravest first; empty where nothing is wrong.

    Args:
        settings: As settings.json has them.
        metrics: Records of metrics.jsonl: ``step`` and numbers by name, None or NaN where one is not finite.
        trained: Records of train.jsonl.
        evaluations: Records of eval.jsonl.
    """
    seen = _Seen(flatten(dict(settings)), tuple(metrics), tuple(trained), tuple(evaluations))
    for rule in _RULES:
        rule(seen)
    return tuple(seen.found)


def _number(record: _Record, name: str) -> float:
    value = record.get(name)
    return float("nan") if value is None else float(value)


def _last(records: Sequence[_Record], holds: Callable[[_Record], bool]) -> Sequence[_Record]:
    """Return the records at the end in all of which a condition holds."""
    start = len(records)
    while start and holds(records[start - 1]):
        start -= 1
    return records[start:]


def _known(records: Iterable[_Record], *names: str) -> list[float]:
    return [value for record in records for name in names if math.isfinite(value := _number(record, name))]


def _mean(records: Iterable[_Record], name: str) -> float | None:
    values = _known(records, name)
    return fmean(values) if values else None


def _total(records: Iterable[_Record], *names: str) -> float:
    return sum(_known(records, *names))


def _equal_groups(seen: _Seen) -> None:
    """Tell of batches whose groups all have equal rewards, from which nothing is learned."""
    settings = seen.settings
    is_compared = settings.get("advantage.estimator") != "reinforce_pp"  # which compares with the batch
    if not is_compared or settings.get("rollout.n_samples_per_prompt", 1) < 2 or settings.get("rollout.mode") == "sft":
        return
    streak = _last(seen.metrics, lambda each: _number(each, "rollout/group_reward_std") < _EQUAL)
    if len(streak) < _STREAK:
        return
    right, reward = _mean(streak, "rollout/correct_ratio"), _mean(streak, "rollout/reward_mean") or 0.0
    if right is not None:
        kind, words = ("hard" if right < 0.5 else "easy"), f"{right:.0%} of answers right"
    else:
        kind = "hard" if reward <= 0 else "easy" if reward >= 1 else "unknown"
        words = f"mean reward {reward:.3g}"
    seen.tell("equal_groups", streak, _difficulty(settings), f"all groups equal for {{steps}}, {words}", _OTHERS[kind])


def _equal_dropped(seen: _Seen) -> None:
    """Tell of a filter that drops nearly everything, as prompts are too easy or too hard."""

    def equal(record: _Record) -> dict[float, float]:
        """Return how many groups were dropped by the reward that all of a group have."""
        found = dict[float, float]()
        for name in record:
            if name.startswith(_ZERO_STD):
                with suppress(ValueError):  # a reason of somebody's own filter
                    found[float(name.removeprefix(_ZERO_STD))] = _number(record, name)
        return found

    def share(record: _Record) -> float:
        return sum(equal(record).values()) / max(_number(record, "rollout/groups_submitted"), 1.0)

    streak = _last(seen.metrics, lambda each: share(each) >= _DROPPED)
    if len(streak) < _STREAK:
        return
    counts = [each for record in streak for each in equal(record).items()]
    low = sum(count for reward, count in counts if reward <= 0)
    kind = "hard" if low > 0.5 * sum(count for _, count in counts) else "easy"
    told = f"{fmean(map(share, streak)):.0%} of groups dropped as equal for {{steps}}"
    seen.tell("equal_dropped", streak, _difficulty(seen.settings), told, _OTHERS[kind])


def _difficulty(settings: Mapping[str, Any]) -> str:
    """Return the setting that says how hard prompts are."""
    if settings.get("prompts.adaptive.environment_list"):
        return "prompts.adaptive.initial_difficulty"
    if settings.get("prompts.environments"):
        return "prompts.environments.0.level"
    return "prompts.datasets.0.path" if settings.get("prompts.datasets") else "plugins.prompt_source"


def _truncated(seen: _Seen) -> None:
    """Tell of batches of which most answers end at a limit."""
    streak = _last(seen.metrics, lambda each: _number(each, "rollout/truncated_ratio") >= _TRUNCATED)
    if len(streak) < _STREAK:
        return
    setting = "sampling.rollout_max_response_len"
    longest = max(_known(streak, "rollout/response_length_max"), default=math.inf)
    if longest < _SHORT:  # which is meant to be
        return
    if longest < seen.settings.get(setting, 0):
        setting = "tools.max_turns" if any("rollout/turns_mean" in each for each in streak) else "engine.context_length"
    told = f"{_mean(streak, 'rollout/truncated_ratio'):.0%} of answers cut off for {{steps}}"
    seen.tell("truncated", streak, setting, told, "raise the limit, or ask for shorter answers")


def _empty(seen: _Seen) -> None:
    """Tell of batches of which most answers have no token."""
    streak = _last(seen.metrics, lambda each: _number(each, "rollout/empty_ratio") >= _EMPTY)
    if len(streak) >= _STREAK:
        told = f"{_mean(streak, 'rollout/empty_ratio'):.0%} of answers empty for {{steps}}"
        seen.tell("empty", streak, "model.chat_template", told, "see whether the template fits the model")


def _reward_errors(seen: _Seen) -> None:
    """Tell of gradings that fail or take too long."""
    window = seen.metrics[-_WINDOW:]
    graded = _total(window, "rollout/groups_submitted") * seen.settings.get("rollout.n_samples_per_prompt", 1)
    errors, timeouts = _total(window, "rollout/reward_error"), _total(window, "rollout/reward_timeout")
    if not graded or (errors + timeouts) / graded < _REWARD_ERRORS:
        return
    told = f"{errors:.0f} gradings failed and {timeouts:.0f} took too long in {{steps}}"
    remedy = "mend the reward (`show DIR --filter failed` has the errors)"
    setting = next((key for key in _REWARDS if seen.settings.get(key)), "reward.rm_type")
    if timeouts > errors:
        setting, remedy = "reward.timeout_seconds", "give more time, or make the grader faster"
    seen.tell("reward_errors", window, setting, told, remedy)


def _failures(seen: _Seen) -> None:
    """Tell of groups with a rollout that failed for good."""
    window = seen.metrics[-_WINDOW:]
    submitted, failed = _total(window, "rollout/groups_submitted"), _total(window, "rollout/groups_failed")
    if submitted and failed / submitted >= _FAILED:
        told = f"{failed / submitted:.0%} of groups failed in {{steps}}"
        remedy = "see why (`show DIR --filter failed`), or try again with retry"
        seen.tell("failures", window, "rollout.group_failure", told, remedy)


def _waste(seen: _Seen) -> None:
    """Tell of tokens that are sampled and never trained on, for a reason that a setting has."""
    window, settings = seen.metrics[-_WINDOW:], seen.settings
    generated = _total(window, "rollout/generated_tokens")
    wasted = {reason: _total(window, _WASTED_TOKENS + reason) for reason in _WASTE}
    reason = max(wasted, key=lambda each: wasted[each])
    if len(window) < _STREAK or not generated or wasted[reason] / generated < _WASTED:
        return
    setting, remedy = _WASTE[reason]
    if reason == "requeued":
        more = next((key for key in _OVER_SAMPLING if settings.get(key)), None)
        if more is None and settings.get("rollout.deterministic"):  # whose price this is
            return
        setting, remedy = (more, "submit fewer groups than that at once") if more else (setting, remedy)
    told = f"{wasted[reason] / generated:.0%} of tokens wasted in {{steps}}, most in groups {reason.replace('_', '-')}"
    seen.tell("waste", window, setting, told, remedy)


def _never_drawn(seen: _Seen) -> None:
    """Tell of data sets and environments of which no batch has had a group, though their weights say so."""
    weights = dict[str, tuple[str, float]]()
    for table in ("environments", "datasets"):
        for number, each in enumerate(seen.settings.get(f"prompts.{table}") or ()):
            name = (
                f"{each['id']}@{each.get('level', 0)}" if "id" in each else each.get("name") or Path(each["path"]).stem
            )
            weights[name] = f"prompts.{table}.{number}.weight", each.get("weight", 1.0)
    if seen.settings.get("prompts.adaptive.environment_list"):
        weights["adaptive"] = "prompts.adaptive.weight", seen.settings.get("prompts.adaptive.weight", 1.0)
    names = {name.split("/", 1)[1].rpartition("/")[0] for each in seen.metrics for name in each if _is_source(name)}
    num_groups = sum(value for each in seen.metrics for name, value in each.items() if _is_source(name))
    if not names or names - set(weights):  # of sources that are called otherwise nothing is known
        return
    whole = sum(weight for _, weight in weights.values())
    for name, (setting, weight) in weights.items():
        if name not in names and num_groups * weight / whole >= _EXPECTED:
            told = f"no group of {name} in {{steps}}"
            seen.tell(
                "never_drawn", seen.metrics, setting, told, "see whether its groups are all dropped, or draw more"
            )


def _is_source(name: str) -> bool:
    return name.startswith("sources/") and name.endswith("/groups")


def _stale(seen: _Seen) -> None:
    """Tell of batches that are as old as they may be, while groups beyond that are lost."""
    bound: float = seen.settings.get("rollout.max_staleness") or math.inf
    streak = _last(
        seen.metrics,
        lambda each: _number(each, "rollout/staleness_max") >= bound and _number(each, "rollout/groups_stale") > 0,
    )
    if len(streak) >= _STREAK:
        lost = counted(int(_total(streak, "rollout/groups_stale")), "group")
        told = f"staleness at its bound for {{steps}}, {lost} too old"
        remedy = "have fewer answers in flight, train faster, or allow more"
        seen.tell("stale", streak, "rollout.max_staleness", told, remedy)


def _idle_engine(seen: _Seen) -> None:
    """Tell of servers that wait while an update is computed."""
    settings, window = seen.settings, seen.metrics[-_WINDOW:]
    has_servers = any(key.startswith(("engine.sglang.", "engine.openai.")) for key in settings)
    waits = settings.get("rollout.mode") in ("sync", "partial") and not settings.get("engine.launch.colocate")
    share = _total(window, "time/train_seconds") / max(_total(window, "time/total_seconds"), 1e-9)
    if has_servers and waits and len(window) >= _STREAK and share >= _IDLE:
        told = f"the engine idle for {share:.0%} of {{steps}}, while updates are computed"
        seen.tell("idle_engine", window, "rollout.mode", told, "make the next batch meanwhile with async")


def _entropy(seen: _Seen) -> None:
    """Tell of a policy that tries nothing new while it is far from solving its task."""
    known = [record for record in seen.trained if _known([record], "train/entropy")]
    if len(known) < _LONG:
        return
    window = known[-_WINDOW:]
    first, last = _total(known[:_WINDOW], "train/entropy") / _WINDOW, _total(window, "train/entropy") / _WINDOW
    right = _mean(seen.metrics[-_WINDOW:], "rollout/correct_ratio")
    if last <= _ENTROPY and last <= _ENTROPY_LEFT * first and right is not None and right < _SOLVED:
        told = f"entropy fallen from {first:.2g} to {last:.2g} nats in {{steps}}, {right:.0%} of answers right"
        remedy = "let unlikely tokens become likelier (0.28 in DAPO), or lower the learning rate"
        seen.tell("entropy", [known[0], window[-1]], "train.loss.clip_high", told, remedy)


def _accuracy(seen: _Seen) -> None:
    """Tell of held-out accuracy that has fallen on a set, or has not risen on any."""
    if len(seen.evaluations) < 2:
        return
    records = [seen.evaluations[0], seen.evaluations[-1]]
    changes: Mapping[str, _Record] = records[1].get("change", {})
    for name in [name for name, change in changes.items() if change["high"] < 0]:
        told = f"accuracy on {name} fell by {-changes[name]['accuracy']:.3f} in {{steps}}"
        seen.tell("accuracy_fell", records, _RATE, told, "lower the learning rate, or weigh a reference")
    solved = all((found.get("accuracy") or 0.0) >= _SOLVED for found in records[1]["sets"].values())
    is_long = len(seen.evaluations) >= _EVALUATIONS and records[1]["step"] - records[0]["step"] >= _LONG
    is_flat = all(change["low"] <= 0 <= change["high"] and change["accuracy"] < _RISEN for change in changes.values())
    if changes and is_long and not solved and is_flat:
        remedy = "train on prompts like those, evaluate more of them, or raise the learning rate"
        seen.tell("accuracy_flat", records, _RATE, "held-out accuracy as it was after {steps}", remedy)


def _reward(seen: _Seen) -> None:
    """Tell of rewards that no longer mean what they should."""
    for sign in reward_signs(seen.metrics, seen.evaluations):
        seen.tell(sign.name, sign.records, sign.setting, sign.seen, sign.remedy)


_RATE = "train.optimizer.learning_rate"
_RULES: tuple[Callable[[_Seen], None], ...] = (
    *(_failures, _reward_errors, _reward, _equal_groups, _equal_dropped, _empty, _truncated, _accuracy, _entropy),
    _Limit(
        "clipped",
        ("train/clipped_low_ratio", "train/clipped_high_ratio"),
        0.4,
        _RATE,
        "a share of {value} of the tokens clipped for {steps}",
        "updates are too large; lower the learning rate, or make fewer updates of a batch",
    ),
    _Limit(
        "mismatch",
        ("train/mismatch_kl",),
        0.1,  # nats; engines and trainers of one precision are below 0.01
        "train.loss.correction",
        "engine and trainer {value} nats a token apart for {steps}",
        "correct for it with truncate, or have the engine compute more precisely",
    ),
    _Limit(
        "far_from_reference",
        ("train/reference_kl",),
        3.0,  # small models that learn a task anew come to 1.6
        "train.loss.kl_coefficient",
        "the policy {value} nats a token from its reference for {steps}",
        "weigh the divergence more, or lower the learning rate",
    ),
    *(_waste, _never_drawn, _stale, _idle_engine),
)
"""In the order of what they tell."""
