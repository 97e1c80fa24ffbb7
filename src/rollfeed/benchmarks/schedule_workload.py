"""The work that ``rollfeed bench schedule`` gives a scheduler, and the settings of each mode for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfeed.config import PluginSettings, RolloutConfig, RolloutSettings, SamplingSettings
from rollfeed.protocols import GenerateFn, GroupFilter, PromptSource
from rollfeed.testing import END_OF_TURN, CharTokenizer
from rollfeed.testing.fake_sglang import FakeMode, FakeSettings, TimeModelSettings
from rollfeed.types import Drop, FilterDecision, Keep, Prompt, Sample

FILTERED = "filtered"
"""Why the bench's filter drops a group."""
_GOLDEN_RATIO = (math.sqrt(5.0) - 1.0) / 2.0
_RESERVE = 1.25
"""Groups in flight over those that keep all slots busy on average: how many of them are busy fluctuates."""
_NUM_SIMULATED_GROUPS = 4096
_ROOM_TOKENS = 16


class ScheduleMode(StrEnum):
    """A way in which batches come about."""

    SYNC = "sync"
    """Step after step, as many prompts as a batch has."""
    OVERSAMPLE = "oversample"
    """Step after step, twice as many prompts; what is not needed is thrown away."""
    PARTIAL = "partial"
    """Step after step; what is cut off at the end goes on in the next step."""
    ASYNC = "async"
    """Generation never stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleWorkload:
    """Engines, lengths, and batches; by default a tenth of the published size."""

    mode: ScheduleMode
    num_steps: int
    num_engines: int = 4
    num_slots: int = 64
    """Of one engine."""
    rollout_batch_size: int = 32
    n_samples_per_prompt: int = 8
    filtered_share: float = 0.0
    """Of all groups; which ones depends on the number of the prompt only."""
    prompt_tokens: int = 15
    median_length: float = 200.0
    sigma_between: float = 0.6
    sigma_within: float = 0.6
    max_length: int = 1_638
    step_ms: float = 8.0
    step_ms_per_request: float = 0.05
    prefill_us_per_token: float = 2.0
    weight_updates: bool = False
    """After every batch: a new version, which the engines take between two tokens."""
    max_staleness: int = 32
    """In async mode; wide, since a step here has no training time and the longest response lasts several."""
    seed: int = 0

    @classmethod
    def published(cls, **fields: Any) -> ScheduleWorkload:
        """Return the workload at its full lengths."""
        lengths = {"median_length": 2_000.0, "max_length": 16_384, "prompt_tokens": 150, "prefill_us_per_token": 20.0}
        return cls(**{**lengths, **fields})

    @property
    def time_model(self) -> TimeModelSettings:
        return TimeModelSettings(
            num_slots=self.num_slots,
            step_ms=self.step_ms,
            step_ms_per_request=self.step_ms_per_request,
            prefill_us_per_token=self.prefill_us_per_token,
            median_length=self.median_length,
            sigma_between=self.sigma_between,
            sigma_within=self.sigma_within,
            max_length=self.max_length,
            seed=self.seed,
        )

    @property
    def fake_settings(self) -> FakeSettings:
        """All engines, in one process."""
        return FakeSettings(
            mode=FakeMode.TIME_MODEL,
            num_workers=self.num_engines,
            time_model=self.time_model,
            context_length=self.context_length,
            keep_requests=0,
        )

    @property
    def max_response_tokens(self) -> int:
        """Tokens of the longest response, of all its turns."""
        return self.max_length

    @property
    def generate_fn(self) -> GenerateFn | None:
        """Answers a prompt; None for the built-in one."""
        return None

    @property
    def context_length(self) -> int:
        """Tokens of prompt and longest response, and a little room."""
        return self.prompt_tokens + self.max_response_tokens + _ROOM_TOKENS

    @property
    def total_slots(self) -> int:
        return self.num_engines * self.num_slots

    @property
    def requests_at_servers(self) -> int:
        """Slots, and a few more that wait at the engines so that a slot is taken again at once.

        The others wait in the client, first come first served. In async mode a quarter of the slots may wait, so that
        a client which is late now and then empties no slot; elsewhere a sixteenth, since all come back at every abort.
        """
        share = 4 if self.mode is ScheduleMode.ASYNC else 16
        return self.total_slots + max(self.num_engines, self.total_slots // share)

    @property
    def groups_in_flight(self) -> int:
        """Groups that a mode works on at once.

        A group is in flight until its longest response ends, but holds a slot for each response only while that one
        lasts. By Little's law all slots are busy on average with (slots / responses of a group) x (mean of the longest
        response / mean length) groups; a quarter more makes up for fluctuation.
        """
        if self.mode is ScheduleMode.SYNC:
            return self.rollout_batch_size
        if self.mode is ScheduleMode.OVERSAMPLE:
            return 2 * self.rollout_batch_size
        filling = self.total_slots / self.n_samples_per_prompt * self.longest_over_mean()
        return max(self.rollout_batch_size, math.ceil(_RESERVE * filling))

    def longest_over_mean(self) -> float:
        """Return how long a group is in flight, over how long one of its responses holds a slot."""
        random = np.random.default_rng(self.seed)
        between = random.normal(0.0, self.sigma_between, (_NUM_SIMULATED_GROUPS, 1))
        within = random.normal(0.0, self.sigma_within, (_NUM_SIMULATED_GROUPS, self.n_samples_per_prompt))
        lengths = np.clip(self.median_length * np.exp(between + within), 1, self.max_length)
        return float(lengths.max(axis=1).mean() / lengths.mean())

    def rollout_config(self) -> RolloutConfig:
        """Return the settings of the run."""
        return RolloutConfig(
            seed=self.seed,
            rollout=RolloutSettings(
                num_rollout=self.num_steps,
                rollout_batch_size=self.rollout_batch_size,
                n_samples_per_prompt=self.n_samples_per_prompt,
                # Those that may not be at a server yet wait inside the engine client.
                max_requests_in_flight=2 * self.groups_in_flight * self.n_samples_per_prompt + self.total_slots,
                **self._mode_settings(),
            ),
            plugins=PluginSettings(
                generate=self.generate_fn,
                reward=_every_other,
                group_filters=(drop_share(self.filtered_share),) if self.filtered_share else (),
            ),
            sampling=SamplingSettings(rollout_max_response_len=self.max_response_tokens),
        )

    def _mode_settings(self) -> dict[str, Any]:
        in_flight = self.groups_in_flight
        match self.mode:
            case ScheduleMode.SYNC:
                return {}
            case ScheduleMode.OVERSAMPLE:
                return {"over_sampling_batch_size": in_flight, "surplus": "drop", "requeue_aborted": False}
            case ScheduleMode.PARTIAL:
                full_slots = {"refill_granularity": 1, "refill_counts": "in_flight"}
                return {"mode": "partial", "over_sampling_batch_size": in_flight, **full_slots}
            case ScheduleMode.ASYNC:
                bounds = {"refill_granularity": 1, "max_staleness": self.max_staleness}
                return {"mode": "async", "over_sampling_batch_size": in_flight, **bounds}


class QuickTokenizer(CharTokenizer):
    """Decodes a response at once: with a character after the other the tokenizer would be what is measured."""

    def decode(self, token_ids: Sequence[int] | NDArray[np.int32], *, skip_special_tokens: bool) -> str:
        """As :meth:`CharTokenizer.decode`."""
        ids = np.asarray(token_ids, "<u4")
        if skip_special_tokens:
            ids = ids[ids != END_OF_TURN]
        return ids.tobytes().decode("utf-32-le", "surrogatepass")


class NumberedPrompts(PromptSource):
    """A source of prompts that are all different, without end."""

    def __init__(self, *, prompt_tokens: int, seed: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._seed = seed
        self.num_drawn = 0

    async def draw(self, count: int) -> list[Prompt]:
        prompts = [self.prompt(number) for number in range(self.num_drawn, self.num_drawn + count)]
        self.num_drawn += count
        return prompts

    def state_dict(self) -> dict[str, Any]:
        return {"num_drawn": self.num_drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position."""
        self.num_drawn = state["num_drawn"]

    def prompt(self, number: int) -> Prompt:
        text = f"{self._seed}.{number}:".ljust(self._prompt_tokens, "x")
        return Prompt(
            prompt_id=f"numbered/{number}",
            source="numbered",
            text=text,
            token_ids=CharTokenizer().encode(text, add_special_tokens=False),
            metadata={"number": number},
        )


def drop_share(share: float) -> GroupFilter:
    """Return a filter that drops this share of all prompts, spread evenly over their numbers.

    A prompt's number is hashed by multiplication with the golden ratio, so that among any prompts in a row the share is
    met within a prompt or two; chance would add a percent or two to what a run is measured against.
    """

    def decide(samples: Sequence[Sample]) -> FilterDecision:
        return Drop(FILTERED) if samples[0].metadata["number"] * _GOLDEN_RATIO % 1.0 < share else Keep()

    return decide


async def _every_other(sample: Sample, prompt: Prompt) -> float:
    """Cost nothing."""
    del prompt
    return float(sample.index % 2)
