"""The engine in virtual time, against what can be said in closed form."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from tests.testing.fake_sglang.conftest import plain_client

from rollfeed.errors import ConfigError
from rollfeed.testing.fake_sglang import (
    TimeModel,
    TimeModelSettings,
    VirtualClock,
    bound_seconds,
    bound_tokens_per_second,
    draw_length,
    mean_length,
    serve_fake_sglang,
)
from rollfeed.testing.fake_sglang.wire import FakeJob
from rollfeed.testing.virtual_loop import in_virtual_time

FREE_PREFILL: dict[str, Any] = {"prefill_us_per_token": 0.0}


class Engine:
    """A model, its clock, and what has ended at what time."""

    def __init__(self, **settings: Any) -> None:
        self.settings = TimeModelSettings(**settings)
        self.clock = VirtualClock()
        self.model = TimeModel(self.settings, self.clock)
        self.ended: list[tuple[float, FakeJob]] = []
        self.then: Callable[[], object] = lambda: None

    def ask(self, *, prompt: Sequence[int] = (1, 2, 3), tokens: int = 100, **fields: Any) -> FakeJob:
        """Ask for exactly ``tokens`` unless told otherwise."""
        job = FakeJob(
            **{
                "rid": f"r{len(self.ended)}",
                "prompt": json.dumps(list(prompt)).encode(),
                "prompt_tokens": len(prompt),
                "max_new_tokens": tokens,
                "sample_key": 0,
                "ignore_eos": True,
                "return_logprob": True,
                "scores_from": None,
                "on_end": self._end,
                **fields,
            }
        )
        self.model.submit(job)
        return job

    def times(self) -> list[float]:
        return [when for when, _ in self.ended]

    def _end(self, job: FakeJob) -> None:
        self.ended.append((self.clock.now(), job))
        self.then()


def ids_of(job: FakeJob) -> list[int]:
    return json.loads(b"[" + b"".join(job.output.ids) + b"]")


def kinds(jobs: Iterable[FakeJob]) -> list[str]:
    return [job.finish_reason["type"] for job in jobs if job.finish_reason]


def test_a_request_alone_takes_its_prefill_and_its_steps() -> None:
    engine = Engine(prefill_us_per_token=1000.0)
    engine.ask(prompt=range(50), tokens=100)
    engine.clock.run_until_idle()
    assert engine.times() == [pytest.approx(0.050 + 100 * 0.00805)]


def test_slots_are_busy_while_their_requests_are_prefilled_and_decoded() -> None:
    engine = Engine(prefill_us_per_token=1000.0)
    engine.ask(prompt=range(50), tokens=100)
    engine.ask(prompt=range(50), tokens=200)
    engine.clock.run_until_idle()
    alone, together = 0.050 + 100 * 0.00805, 0.050 + 100 * 0.0081
    assert engine.model.usage().busy_slot_seconds == pytest.approx(alone + 2 * together)


def test_a_full_batch_makes_what_the_closed_form_says() -> None:
    engine = Engine(**FREE_PREFILL)
    for _ in range(64):
        engine.ask(tokens=1000)
    engine.clock.run_until_idle()
    rate = 64 * 1000 / engine.clock.now()
    assert rate == pytest.approx(bound_tokens_per_second(engine.settings), rel=1e-6)
    assert rate == pytest.approx(64 / 0.0112, rel=1e-6)


def test_full_slots_and_heavy_tails_keep_to_the_bound() -> None:
    engine = Engine()
    lengths: list[int] = []
    asked = 0

    def ask() -> None:
        nonlocal asked
        asked += 1
        engine.ask(prompt=(7, asked // 8), tokens=20_000, sample_key=asked, ignore_eos=False)

    def refill() -> None:
        if engine.clock.now() < 1000.0:
            lengths.append(engine.ended[-1][1].output.num_tokens)
            ask()

    engine.then = refill
    for _ in range(64):
        ask()
    engine.clock.advance(1000.0)
    made = engine.model.usage().generated_tokens
    best = bound_tokens_per_second(engine.settings, prompt_tokens=2)
    assert made / 1000.0 == pytest.approx(best, rel=0.002)
    assert bound_seconds(engine.settings, lengths, prompt_tokens=2) <= 1000.0


def test_mean_lengths_are_those_of_the_closed_form() -> None:
    settings = TimeModelSettings(median_length=300.0, sigma_between=0.5, sigma_within=0.8, max_length=1000)
    drawn = [draw_length(settings, np.array([prompt], np.int32), sample) for prompt in range(4000) for sample in (1, 2)]
    assert np.mean(drawn) == pytest.approx(mean_length(settings), rel=0.02)
    assert max(drawn) == 1000
    assert mean_length(TimeModelSettings(sigma_between=0.0, sigma_within=0.0)) == 2000.0


def test_samples_of_a_prompt_are_alike_and_lengths_fixed_by_seed_prompt_and_sample() -> None:
    settings = TimeModelSettings(median_length=200.0)
    drawn = np.array(
        [[draw_length(settings, np.array([prompt], np.int32), sample) for sample in range(8)] for prompt in range(500)]
    )
    logs = np.log(drawn)
    assert logs.std(axis=1, ddof=1).mean() == pytest.approx(0.58, abs=0.05)
    assert logs.mean(axis=1).std() == pytest.approx(np.hypot(0.6, 0.6 / 8**0.5), abs=0.06)
    prompt = np.array([5, 6], np.int32)
    assert draw_length(settings, prompt, "a") == draw_length(settings, prompt.astype(np.int64), "a")
    others = [draw_length(settings, prompt, "b"), draw_length(TimeModelSettings(seed=1), prompt, "a")]
    assert draw_length(settings, prompt, "a") not in others


def test_requests_beyond_the_slots_wait_in_order() -> None:
    engine = Engine(num_slots=2, **FREE_PREFILL)
    jobs = [engine.ask(tokens=tokens) for tokens in (10, 20, 10, 10)]
    usage = engine.model.usage()
    assert (usage.num_running, usage.num_waiting) == (2, 2)
    engine.clock.run_until_idle()
    assert [job for _, job in engine.ended] == [jobs[0], jobs[1], jobs[2], jobs[3]]
    assert engine.times() == pytest.approx([10 * 0.0081, 20 * 0.0081, 20 * 0.0081, 30 * 0.0081 - 10 * 0.00005])


def test_one_that_comes_within_a_step_joins_at_its_end() -> None:
    engine = Engine(**FREE_PREFILL)
    engine.ask(tokens=10)
    engine.clock.advance(0.00805 * 2.5)
    engine.ask(tokens=1)
    engine.clock.run_until_idle()
    assert engine.times() == pytest.approx([0.00805 * 3 + 0.0081, 0.00805 * 9 + 0.0081])


def test_prefill_holds_the_others_up() -> None:
    engine = Engine(prefill_us_per_token=100.0)
    engine.ask(prompt=[1], tokens=10)
    engine.clock.advance(0.0001 + 0.00805 * 5)
    engine.ask(prompt=range(1000), tokens=1)
    engine.clock.run_until_idle()
    assert engine.times()[-1] == pytest.approx(0.1001 + 0.00805 * 9 + 0.0081)


def test_cached_prompts_cost_one_token_until_the_flush() -> None:
    engine = Engine(prefill_us_per_token=1000.0, prefix_cache=True)
    times = []
    for flush in (False, False, True):
        if flush:
            engine.model.flush()
        start = engine.clock.now()
        engine.ask(prompt=range(500), tokens=1)
        engine.clock.run_until_idle()
        times.append(engine.clock.now() - start - 0.00805)
    assert times == pytest.approx([0.5, 0.001, 0.5])
    assert [job.cached_tokens for _, job in engine.ended] == [0, 499, 0]
    usage = engine.model.usage()
    assert (usage.prefilled_tokens, usage.prefill_seconds) == (1001, pytest.approx(1.001))


def test_a_turn_finds_the_turns_before_it() -> None:
    engine = Engine(prefill_us_per_token=1000.0, prefix_cache=True)
    first = engine.ask(prompt=range(100), tokens=50)
    engine.clock.run_until_idle()
    start = engine.clock.now()
    second = engine.ask(prompt=[*range(100), *ids_of(first), 7, 8, 9], tokens=1)
    engine.clock.run_until_idle()
    assert second.cached_tokens == 150
    assert engine.clock.now() - start == pytest.approx(0.003 + 0.00805)


def test_what_a_flush_has_outdated_is_not_held_when_it_ends() -> None:
    engine = Engine(prefix_cache=True)
    first = engine.ask(prompt=range(100), tokens=50)
    engine.clock.advance(0.1)
    engine.model.flush()
    engine.clock.run_until_idle()
    turns = [engine.ask(prompt=[*range(100), *ids_of(first), 7], tokens=1) for _ in range(2)]
    engine.clock.run_until_idle()
    assert [job.cached_tokens for job in turns] == [0, 150]


def test_prefixes_are_held_in_the_room_that_running_requests_leave() -> None:
    engine = Engine(num_slots=4, kv_budget_tokens=450, prefix_cache=True, page_tokens=10)
    asked = []
    for start in (0, 1000, 0, 2000, 1000, 0):
        asked.append(engine.ask(prompt=range(start, start + 200), tokens=1))
        engine.clock.run_until_idle()
    assert [job.cached_tokens for job in asked] == [0, 0, 199, 0, 40, 40]


def test_requests_that_share_a_prompt_take_its_room_once() -> None:
    engine = Engine(num_slots=8, kv_budget_tokens=1000, prefix_cache=True)
    jobs = [engine.ask(prompt=range(300), tokens=50) for _ in range(8)]
    engine.clock.advance(0.2)
    assert engine.model.usage().num_running == 8
    assert engine.model.usage().num_used_tokens < 300 + 8 * 50
    engine.clock.run_until_idle()
    assert kinds(jobs) == ["length"] * 8
    assert engine.model.usage().num_used_tokens == 0


def test_large_batches_can_be_slow() -> None:
    settings = TimeModelSettings(num_slots=1024, fast_batch_size=256, slow_factor=4.0)
    assert settings.step_seconds(257) == pytest.approx(4 * (0.008 + 257 * 0.00005))
    assert bound_tokens_per_second(settings) == pytest.approx(256 / settings.step_seconds(256), rel=1e-6)


def test_an_outgrown_budget_puts_the_newest_back_and_computes_it_again() -> None:
    engine = Engine(num_slots=4, kv_budget_tokens=500, prefill_us_per_token=1000.0)
    old = engine.ask(prompt=range(100), tokens=300)
    new = engine.ask(prompt=range(100), tokens=200)
    engine.clock.run_until_idle()
    assert [job for _, job in engine.ended] == [old, new]
    assert (old.num_retractions, new.num_retractions) == (0, 1)
    assert (old.output.num_tokens, new.output.num_tokens) == (300, 200)
    assert engine.model.usage().num_retracted == 0  # long ago
    # Both made 150 together before the budget was full; then `old` alone, then `new` again with its prefill.
    assert engine.times()[0] == pytest.approx(0.2 + 150 * 0.0081 + 150 * 0.00805, rel=0.01)


def test_what_was_put_back_is_told_of_for_a_while() -> None:
    engine = Engine(num_slots=4, kv_budget_tokens=500, **FREE_PREFILL)
    for _ in range(2):
        engine.ask(prompt=range(100), tokens=300)
    engine.clock.advance(0.0081 * 160)
    usage = engine.model.usage()
    assert (usage.num_running, usage.num_waiting, usage.num_retracted) == (1, 1, 1)
    assert usage.load("core,queues")["queues"]["retracted"] == 1
    assert "queues" not in usage.load("core")
    engine.clock.advance(0.0081 * 60)
    assert engine.model.usage().num_retracted == 0


def test_what_can_never_fit_is_ended_and_the_next_one_goes_on() -> None:
    engine = Engine(kv_budget_tokens=100)
    engine.ask(prompt=range(100), tokens=5)
    engine.ask(prompt=range(50), tokens=80)
    engine.ask(prompt=range(10), tokens=5)
    engine.clock.run_until_idle()
    outcome = [
        (job.prompt_tokens, kind)
        for (_, job), kind in zip(engine.ended, kinds(j for _, j in engine.ended), strict=True)
    ]
    assert sorted(outcome) == [(10, "length"), (50, "abort"), (100, "abort")]


def test_aborted_requests_have_the_tokens_of_whole_steps() -> None:
    engine = Engine(**FREE_PREFILL)
    running = engine.ask(tokens=1000, rid="a")
    engine.clock.advance(0.00805 * 7.5)
    assert engine.model.abort(lambda job: job.rid == "a") == 1
    assert kinds([running]) == ["abort"]
    assert running.output.num_tokens == 7
    assert engine.model.usage().num_used_tokens == 0
    engine.clock.run_until_idle()
    assert len(engine.ended) == 1


def test_a_request_that_goes_on_gets_the_rest_of_the_same_response_anywhere() -> None:
    prompt = [11, 40_000, 12]
    whole = Engine(seed=3)
    job = whole.ask(prompt=prompt, tokens=20_000, ignore_eos=False, sample_key="s")
    whole.clock.run_until_idle()
    expected = ids_of(job)
    for cut in (1, 2, 50):
        first = Engine(seed=3).ask(prompt=prompt, tokens=20_000, ignore_eos=False, sample_key="s")
        assert first.output.num_tokens == 0
        elsewhere = Engine(seed=99)
        rest = elsewhere.ask(prompt=[*prompt, *expected[:cut]], tokens=20_000, ignore_eos=False, sample_key="other")
        elsewhere.clock.run_until_idle()
        assert expected[:cut] + ids_of(rest) == expected
        assert rest.finish_reason == {"type": "stop", "matched": 2}
    limited = Engine()
    part = limited.ask(prompt=[*prompt, *expected[:10]], tokens=5, ignore_eos=False)
    limited.clock.run_until_idle()
    assert (ids_of(part), part.finish_reason) == (expected[10:15], {"type": "length", "length": 5})


def test_what_was_said_after_a_response_begins_a_new_one() -> None:
    engine = Engine()
    first = engine.ask(tokens=40, ignore_eos=False)
    engine.clock.run_until_idle()
    second = engine.ask(prompt=[1, 2, 3, *ids_of(first), 77], tokens=20_000, ignore_eos=False)
    engine.clock.run_until_idle()
    assert ids_of(second)[0] > 20_480


def test_pausing_stops_time_for_requests() -> None:
    engine = Engine(**FREE_PREFILL)
    engine.ask(tokens=10)
    engine.clock.advance(0.00805 * 4)
    engine.model.pause("in_place")
    engine.clock.advance(100.0)
    engine.model.resume()
    engine.clock.run_until_idle()
    assert engine.times() == [pytest.approx(100.0 + 10 * 0.00805)]


def test_new_weights_stall_the_engine() -> None:
    engine = Engine(**FREE_PREFILL)
    engine.ask(tokens=10)
    engine.model.stall(2.0)
    engine.clock.run_until_idle()
    assert engine.times() == [pytest.approx(2.0 + 10 * 0.00805)]


class ObservedClock(VirtualClock):
    """Keeps its timers, which may come late."""

    def __init__(self, *, late_seconds: float = 0.0) -> None:
        super().__init__()
        self.timers: list[Any] = []
        self.late_seconds = late_seconds

    def call_at(self, when: float, callback: Callable[[], object]) -> Any:
        self.timers.append(super().call_at(when + self.late_seconds, callback))
        return self.timers[-1]


def test_a_late_timer_costs_no_throughput() -> None:
    engine = Engine(num_slots=1, **FREE_PREFILL)
    engine.clock = ObservedClock(late_seconds=50.0)
    engine.model = TimeModel(engine.settings, engine.clock)
    for _ in range(10):
        engine.ask(tokens=10)
    engine.clock.advance(10 * 10 * 0.00805 + 50.0)
    assert len(engine.ended) == 10


def test_one_timer_serves_all_requests() -> None:
    engine = Engine()
    clock = engine.clock = ObservedClock()
    engine.model = TimeModel(engine.settings, clock)
    for _ in range(200):
        engine.ask(tokens=1000)
    assert sum(timer.callback is not None for timer in clock.timers) == 1


@pytest.mark.parametrize(
    "settings",
    [{"num_slots": 0}, {"max_length": 30_000}, {"median_length": 0.0}, {"sigma_within": -1.0}, {"slow_factor": 0.5}],
)
def test_wrong_settings_are_refused(settings: Any) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        TimeModelSettings(**settings)


async def test_a_server_tells_its_model_and_the_bound(client: Any) -> None:
    async with serve_fake_sglang(mode="time-model", time_model={"num_slots": 8}) as fakes:
        fake = (await client.get(fakes.address + "/server_info"))["fake"]
    settings = TimeModelSettings(**fake["time_model"])
    assert settings == TimeModelSettings(num_slots=8)
    assert fake["bound_tokens_per_second"] == pytest.approx(bound_tokens_per_second(settings))
    assert fake["mean_length"] == pytest.approx(mean_length(settings))


@in_virtual_time
async def test_accelerated_time_finishes_a_batch_over_http() -> None:
    async with (
        serve_fake_sglang(mode="time-model", speed=1000.0, num_workers=2, router="old") as fakes,
        plain_client() as client,
    ):
        replies = await asyncio.gather(
            *(client.generate(fakes.address, max_new_tokens=16_384, sampling_seed=seed) for seed in range(64))
        )
        counts = [await fakes.stats(worker) for worker in (0, 1)]
    assert [reply["meta_info"]["finish_reason"]["type"] for reply in replies] == ["stop"] * 64
    assert sum(len(reply["output_ids"]) for reply in replies) == sum(each["generated_tokens"] for each in counts)
    assert [each["requests"]["/generate"] for each in counts] == [32, 32]
