"""From what a reward function returned to a verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np

from rollfeed.errors import RewardError, RunFailedError
from rollfeed.types import BatchCut, ByAge, Group, Prompt, Rollout, Verdict

REWARD_KEY = "reward_key"
"""Entry of the metadata that chooses among named rewards; where the prompt has none, the hub sets its own."""
GIVEN_WITH_ANSWER = "the reward came with the answer"
"""What a verdict says in detail of a reward that was there before anything scored."""
_ANSWER = "pred"
"""Entry of named rewards with the answer that was graded, as a text."""


def to_verdict(result: Any, *, reward_key: str | None) -> Verdict:
    """Return ``result`` as a verdict: a number, a bool, named numbers or a verdict; anything else is an ERROR.

    Texts among named numbers are for people: ``pred`` becomes the answer that was graded, others are left out.
    """
    try:
        if isinstance(result, Mapping):
            return _named(result, reward_key)
        if not isinstance(result, Verdict):
            return Verdict(reward=_to_number(result, "it returned"))
        if isinstance(result.reward, dict):
            _check_key(result.reward, reward_key)
        return result
    except RewardError as error:
        return Verdict.failed(str(error))


def pick(verdict: Verdict, reward_key: str) -> Verdict:
    """Return the verdict with the entry under ``reward_key`` as its reward, where that is a dictionary."""
    return replace(verdict, reward=verdict.reward[reward_key]) if isinstance(verdict.reward, dict) else verdict


def carried_verdict(rollout: Rollout, prompt: Prompt, reward_key: str | None) -> Verdict | None:
    """Return the verdict of a rollout that is scored already."""
    if rollout.is_scored:
        return rollout.verdict
    if not rollout.samples or rollout.samples[-1].reward is None:
        return None
    verdict = keyed_verdict(rollout.samples[-1].reward, prompt.metadata, reward_key)
    return replace(verdict, correct=rollout.samples[-1].correct, detail=verdict.detail or GIVEN_WITH_ANSWER)


def unfinished(rollouts: Sequence[Rollout]) -> Verdict | None:
    """Return the verdict on all rollouts of a group of which one has not finished."""
    rollout = next((each for each in rollouts if not each.has_finished), None)
    if rollout is None:
        return None
    return Verdict.failed(f"not scored: rollout {rollout.rollout_id} of the group is {rollout.status.value}")


def keyed_verdict(result: Any, metadata: Mapping[str, Any], reward_key: str | None) -> Verdict:
    """Return the verdict, reduced to one number where the prompt names its own key."""
    own_key = metadata.get(REWARD_KEY)
    verdict = to_verdict(result, reward_key=reward_key if own_key is None else str(own_key))
    return verdict if own_key is None else pick(verdict, str(own_key))


def not_a_list(results: Any, rollouts: Sequence[Rollout]) -> Verdict:
    """Return the verdict on what a function of several rollouts returned in place of a result each."""
    got = f"{len(results)} results" if isinstance(results, Sequence | np.ndarray) else f"a {type(results).__name__}"
    return Verdict.failed(f"it returned {got} for {len(rollouts)} rollouts; it must return a list with one result each")


def _named(result: Mapping[Any, Any], reward_key: str | None) -> Verdict:
    if not result or not all(isinstance(name, str) for name in result):
        raise RewardError(f"it returned {result!r:.80}; a reward dictionary maps names to numbers")
    reward = {
        name: _to_number(value, f"entry {name!r} of the reward is")
        for name, value in result.items()
        if name == reward_key or not (value is None or isinstance(value, str))
    }
    _check_key(reward, reward_key)
    answer = result.get(_ANSWER)
    return Verdict(reward=reward, extracted=answer if isinstance(answer, str) else None)


def _to_number(value: Any, what: str) -> float:
    number = value.item() if isinstance(value, np.generic) else value
    if not isinstance(number, Real):
        raise RewardError(f"{what} {value!r:.80}, a {type(value).__name__}; it must be a number")
    try:
        result = float(number)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise RewardError(f"{what} {value!r:.80}; it must be finite")
    return result


def _check_key(reward: Mapping[str, float], reward_key: str | None) -> None:
    if reward_key is None:
        raise RewardError(f"the reward has the entries {sorted(reward)}: set reward_key to one of them")
    if reward_key not in reward:
        raise RewardError(f"reward_key = {reward_key!r} is not in the reward, which has {sorted(reward)}")


class KeyedCut:
    """Cuts batches; until a reward was named numbers, refuses a batch in which none is."""

    def __init__(self, cut: Callable[..., BatchCut | ByAge], *, reward_key: str) -> None:
        self._cut = cut
        self._reward_key = reward_key
        self._has_found = False

    def __call__(self, groups: Sequence[Group], *, step: int, **about: Any) -> BatchCut | ByAge:
        """Return the batch, or what is too old for it. Raises RunFailedError if no reward has entries."""
        if not self._has_found:
            rewards = [sample.reward for group in groups if _takes_key_of_run(group) for sample in group.samples]
            self._has_found = any(isinstance(reward, dict) for reward in rewards)
            if rewards and not self._has_found:
                raise RunFailedError(
                    f"reward_key = {self._reward_key!r}: none of the {len(rewards)} rewards of step {step} has keys, "
                    "each is a single number: remove it, or let what scores return named numbers"
                )
        return self._cut(groups, step=step, **about)


def _takes_key_of_run(group: Group) -> bool:
    metadata = group.prompt.metadata
    return not any(metadata.get(name) is not None for name in (REWARD_KEY, "reward_fn", "rm_type"))
