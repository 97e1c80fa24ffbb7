"""One example of each extension point, about ten lines each; plugins.toml uses them all."""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfeed.protocols import Endpoint, GenerateFn, RolloutContext, RolloutRequest, Tokenizer
from rollfeed.types import Drop, Group, GroupStatus, Keep, Prompt, PromptDraw, RolloutOutput, Sample

COUNTRIES = ("France", "Italy", "Japan", "Egypt", "Peru", "Kenya")


class CountrySource:
    """A prompt source: endless, its state one number. It is made with the tokenizer of the run's model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._next = 0

    async def draw(self, count: int) -> Sequence[Prompt]:
        numbers = range(self._next, self._next + count)
        self._next += count
        return [self._prompt(number) for number in numbers]

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._next = state["next"]

    def _prompt(self, number: int) -> Prompt:
        question = f"Name the capital of {COUNTRIES[number % len(COUNTRIES)]}."
        text = self._tokenizer.render_chat([{"role": "user", "content": question}])
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        return Prompt(prompt_id=f"country/{number}", source="country", text=text, token_ids=token_ids, label=question)


async def shorter_for_later_members(
    request: RolloutRequest, *, default: GenerateFn, endpoint: Endpoint, tokenizer: Tokenizer
) -> Sequence[Sample]:
    """A generate function: changes the parameters, then lets the built-in one do the work."""
    budget = max(1, request.params.max_new_tokens // (1 + request.index % 2))
    request = replace(request, params=replace(request.params, max_new_tokens=budget))
    return await default(request, default=default, endpoint=endpoint, tokenizer=tokenizer)


async def one_wave(context: RolloutContext) -> RolloutOutput:
    """A whole rollout function: as many prompts as the batch has groups, and no filter."""
    draws = await context.draw(context.rollout_batch_size)
    results = await asyncio.gather(*(context.submit(draw) for draw in draws))
    finished = [result.group for result in results if result.status is GroupStatus.FINISHED]
    return RolloutOutput(groups=tuple(finished))


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


def longest_first(entries: Sequence[PromptDraw], count: int, *, policy_version: int) -> list[int]:
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
        print(json.dumps({"step": step, "reward": metrics["rollout/reward_mean"]}), file=sys.stderr)

    def close(self) -> None:
        pass
