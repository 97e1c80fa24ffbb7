"""The fleet that ``rollfeed bench fleet`` simulates: servers, their speed, their deaths, and the work they get."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from rollfeed.benchmarks.schedule_workload import ScheduleMode, ScheduleWorkload
from rollfeed.testing.fake_sglang import FakeMode, FakeSettings

PUBLISHED_DEATHS_PER_GPU_HOUR = 419 / (16_384 * 54 * 24)
"""419 unexpected interruptions in 54 days on 16,384 GPUs. Source: The Llama 3 Herd of Models (arXiv:2407.21783)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetWorkload(ScheduleWorkload):
    """A thousand servers with a hundred requests each, at ten tokens a second for each of them."""

    mode: ScheduleMode = ScheduleMode.ASYNC
    num_steps: int = 1_000_000
    """Not a bound here: a run takes as long as it is told to."""
    num_engines: int = 1_000
    num_slots: int = 100
    rollout_batch_size: int = 1_000
    prompt_tokens: int = 150
    median_length: float = 1_200.0
    sigma_between: float = 0.7
    sigma_within: float = 0.72
    """Together 1.0: the 99th percentile is ten times the median."""
    max_length: int = 16_384
    step_ms: float = 90.0
    step_ms_per_request: float = 0.1
    prefill_us_per_token: float = 20.0
    weight_updates: bool = True
    gpus_per_server: int = 8
    death_factor: float = 100.0
    """Deaths over those published: at that rate a thousand servers see one in six hours."""
    restart_seconds: float = 60.0
    """From the death of a server until it listens again, idle and with its first weights."""
    straggler_share: float = 0.02
    straggler_factor: float = 3.0
    """A step of a straggler takes so many times as long."""
    publish_seconds: float = 60.0
    """Between two versions."""
    update_seconds: float = 2.0
    """In which a server loads one."""

    @property
    def deaths_per_second(self) -> float:
        """Deaths of the whole fleet."""
        return PUBLISHED_DEATHS_PER_GPU_HOUR * self.gpus_per_server * self.num_engines * self.death_factor / 3600.0

    @property
    def num_stragglers(self) -> int:
        """Servers that are slow."""
        return round(self.straggler_share * self.num_engines)

    @property
    def requests_at_servers(self) -> int:
        """As many as all servers decode at once."""
        return self.total_slots

    def server_settings(self, *, is_straggler: bool) -> FakeSettings:
        """Return those of one server."""
        model = self.time_model
        if is_straggler:
            factor = self.straggler_factor
            model = msgspec.structs.replace(
                model, step_ms=factor * model.step_ms, step_ms_per_request=factor * model.step_ms_per_request
            )
        return FakeSettings(
            mode=FakeMode.TIME_MODEL,
            time_model=model,
            context_length=self.context_length,
            keep_requests=0,
            update_seconds=self.update_seconds,
        )
