"""One example of each extension point, about ten lines each; plugins.toml uses them all."""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfeed.protocols import PromptSource, RolloutContext, RolloutRequest, Services, Tokenizer
from rollfeed.types import Drop, Ending, Group, Keep, Prompt, Sample, Trained

COUNTRIES = ("France", "Italy", "Japan", "Egypt", "Peru", "Kenya")


class CountrySource(PromptSource):
    """A prompt source: endless, and it asks no more for what was always right. It is made with the run's tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._next = 0
        self._known: set[str] = set()

    async def draw(self, count: int) -> Sequence[Prompt]:
        prompts: list[Prompt] = []
        while len(prompts) < count:
            if COUNTRIES[self._next % len(COUNTRIES)] not in self._known:
                prompts.append(self._prompt(self._next))
            self._next += 1
        return prompts

    def learn(self, group: Group) -> None:
        country = str(group.prompt.metadata["country"])
        if group.reward_values().min() == 1.0 and len(self._known) < len(COUNTRIES) - 1:
            self._known.add(country)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next, "known": sorted(self._known)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._next, self._known = state["next"], set(state["known"])

    def _prompt(self, number: int) -> Prompt:
        country = COUNTRIES[number % len(COUNTRIES)]
        question = f"Name the capital of {country}."
        text = self._tokenizer.render_chat([{"role": "user", "content": question}])
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        return Prompt(
            prompt_id=f"country/{number}",
            source="country",
            text=text,
            token_ids=token_ids,
            label=question,
            metadata={"country": country},
        )


async def shorter_for_later_members(request: RolloutRequest, *, services: Services) -> Sequence[Sample]:
    """A generate function: changes the parameters, then lets the built-in one do the work."""
    budget = max(1, request.params.max_new_tokens // (1 + request.index % 2))
    request = replace(request, params=replace(request.params, max_new_tokens=budget))
    return await services.default(request, services=services)


async def one_wave(context: RolloutContext) -> list[Ending]:
    """A whole rollout function: as many prompts as the batch has groups, and no filter."""
    drawn = await context.draw(context.rollout_batch_size)
    groups = await asyncio.gather(*(context.submit(group) for group in drawn))
    return [Trained(group) for group in groups if group.is_finished]


def brevity(sample: Sample, prompt: Prompt) -> float:
    """A sample reward: shorter is better."""
    return 1.0 / (1 + sample.response_length)


async def brevity_batched(samples: Sequence[Sample], prompts: Sequence[Prompt]) -> list[float]:
    """A batched reward; this one is async, as a call to a server would be."""
    return [brevity(sample, prompt) for sample, prompt in zip(samples, prompts, strict=True)]


def rank_by_length(samples: Sequence[Sample], prompt: Prompt) -> list[float]:
    """A group reward: the shortest answer of the group gets 1, the longest 0."""
    lengths = [sample.response_length for sample in samples]
    return [sum(length < other for other in lengths) / max(1, len(lengths) - 1) for length in lengths]


def distinct_answers(samples: Sequence[Sample]) -> Keep | Drop:
    """A group filter: keep a group only when its answers differ."""
    return Keep() if len({sample.response for sample in samples}) > 1 else Drop("same_answers")


def least_alike(groups: Sequence[Group]) -> list[int]:
    """A batch filter: those groups first whose answers are least alike; what makes no batch is dropped."""
    num_different = [len({sample.response for sample in group.samples}) for group in groups]
    return sorted(range(len(groups)), key=lambda index: -num_different[index])


def longest_first(entries: Sequence[Group], count: int, *, policy_version: int) -> list[int]:
    """A buffer policy: those prompts leave first that have the most tokens already; equal ones in their order."""
    return sorted(range(len(entries)), key=lambda index: -entries[index].response_tokens)[:count]


def strip_response(sample: Sample, prompt: Prompt) -> Sample:
    """A sample hook: graders see the text without white space around it; the tokens stay as sampled."""
    return replace(sample, response=sample.response.strip())


def rank_advantages(rewards_G: NDArray[np.float64], *, group: Group) -> NDArray[np.float64]:
    """An advantage function: ranks within the group, centred."""
    ranks_G = np.array([(rewards_G < reward).sum() for reward in rewards_G], np.float64)
    return ranks_G - ranks_G.mean()


class PrintTracker:
    """A tracker: one line of JSON a step, on standard error."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        if "rollout/reward_mean" in metrics:  # others are of updates and evaluations
            print(json.dumps({"step": step, "reward": metrics["rollout/reward_mean"]}), file=sys.stderr)

    def close(self) -> None:
        pass
