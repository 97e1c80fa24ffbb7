"""Rewards of ours for TRL's trainers, and TRL's reward functions for rollouts of ours."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rollfeed.base.importing import is_async
from rollfeed.base.waiting import call_in_own_thread
from rollfeed.errors import ConfigError, RewardError
from rollfeed.protocols import Tokenizer
from rollfeed.types import Prompt, Sample, Verdict

SUM = "reward"
"""The sum among named rewards."""
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")


def rollout_reward(*, rollfeed_reward: Sequence[float] | None = None, **_: Any) -> list[float]:
    """Return the rewards that the rollouts have; a reward function for ``GRPOTrainer(reward_funcs=...)``.

    Raises:
        ConfigError: If rollfeed does not score them.
    """
    if rollfeed_reward is None:
        raise ConfigError(
            "rollout_reward: the rollouts are not scored: give RolloutFunc a config with reward.rm_type or "
            "plugins.reward, and the columns of labels and metadata"
        )
    return list(rollfeed_reward)


class TrlRewards:
    """Fits :class:`rollfeed.protocols.BatchedRewardFn`: the sum of reward functions as TRL has them.

    They get ``prompts``, ``completions``, ``completion_ids`` and a list for each further column; None is no reward.
    Plain ones are called in threads, which nothing waits for when the process ends.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]], dataset: Any, tokenizer: Tokenizer) -> None:
        self._functions = {getattr(each, "__name__", type(each).__name__): each for each in functions}
        self._dataset = dataset
        self._tokenizer = tokenizer
        if len(self._functions) < len(functions):
            raise ConfigError(f"two reward_funcs have one name, of {', '.join(self._functions)}: rename one")

    async def __call__(self, samples: Sequence[Sample], prompts: Sequence[Prompt]) -> list[Verdict]:
        rows = [self._dataset[_row_number(prompt)] for prompt in prompts]
        said = [self._tokenizer.decode(each.response_token_ids, skip_special_tokens=True) for each in samples]
        asked = {
            **{name: [row[name] for row in rows] for name in rows[0] if name not in _NOT_COLUMNS},
            "prompts": [row["prompt"] for row in rows],
            "completions": [
                text if prompt.messages is None else [{"role": "assistant", "content": text}]
                for text, prompt in zip(said, prompts, strict=True)
            ],
            "completion_ids": [each.response_token_ids.tolist() for each in samples],
        }
        given = await asyncio.gather(*(_call(name, each, asked) for name, each in self._functions.items()))
        return [_verdict(dict(zip(self._functions, rewards, strict=True))) for rewards in zip(*given, strict=True)]


async def _call(name: str, function: Callable[..., Any], asked: dict[str, Any]) -> Sequence[float | None]:
    given = await (function(**asked) if is_async(function) else _in_own_thread(partial(function, **asked)))
    if len(given) != len(asked["completions"]):
        raise ValueError(f"{name} returned {len(given)} rewards for {len(asked['completions'])} completions")
    return [None if each is None else float(each) for each in given]


async def _in_own_thread(function: Callable[[], Any]) -> Any:
    given, raised = await call_in_own_thread(function, name="rollfeed-reward")
    if raised is not None:
        raise raised if isinstance(raised, Exception) else RewardError(f"it raised {type(raised).__name__}") from raised
    return given


def _verdict(rewards: dict[str, float | None]) -> Verdict:
    known = {name: value for name, value in rewards.items() if value is not None}
    if not known:
        return Verdict.failed("every one of reward_funcs returned None")
    return Verdict(reward={SUM: sum(known.values()), **known})


def _row_number(prompt: Prompt) -> int:
    return int(prompt.prompt_id.rpartition("/")[2].partition("@")[0])
