from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from rollfeed.benchmarks.schedule import bench_schedule
from rollfeed.benchmarks.schedule_figures import (
    CommitLog,
    Fate,
    MeasuredWindow,
    RequestRecord,
    Snapshot,
    count_tokens,
    lengths,
)
from rollfeed.benchmarks.schedule_workload import (
    NumberedPrompts,
    QuickTokenizer,
    ScheduleMode,
    ScheduleWorkload,
    drop_share,
)
from rollfeed.cli import exit_codes
from rollfeed.cli.main import main
from rollfeed.testing import END_OF_TURN, CharTokenizer, make_group, make_sample
from rollfeed.testing.fake_sglang import draw_length
from rollfeed.types import Drop

SMALL = {
    "num_engines": 2,
    "num_slots": 4,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 2,
    "median_length": 10.0,
    "max_length": 60,
}


def small(mode: str, *, num_steps: int = 3, **fields: object) -> ScheduleWorkload:
    return ScheduleWorkload(**{**SMALL, "mode": ScheduleMode(mode), "num_steps": num_steps, **fields})  # type: ignore[arg-type]


def window(began: float, ended: float, *, generated_tokens: int = 0, num_drawn: int = 0) -> MeasuredWindow:
    return MeasuredWindow(
        first_step=0,
        last_step=0,
        began=Snapshot(at=began, generated_tokens=0, busy_slot_seconds=0.0),
        ended=Snapshot(at=ended, generated_tokens=generated_tokens, busy_slot_seconds=0.0),
        num_drawn=num_drawn,
    )


def request(started: float, ended: float, num_tokens: int) -> RequestRecord:
    return RequestRecord(started, ended, num_tokens, has_finished=True, is_resumed=False)


def fate(*response_lengths: int, dropped_as: str | None = None, step: int = 0) -> Fate:
    return Fate(step=step, dropped_as=dropped_as, lengths=response_lengths)


def test_synchronous_steps_train_all_that_they_make() -> None:
    told: list[str] = []
    result = bench_schedule(small("sync"), progress=told.append)
    assert 0.0 < result["efficiency"] < 1.0
    assert 0.0 < result["idle"] < 1.0
    assert (result["wasted_fraction"], result["wasted_by_reason"]) == (0.0, {})
    assert result["length_bias"] == 0.0
    assert result["window"]["trained_tokens"] == pytest.approx(result["window"]["generated_tokens"])
    assert (result["window"]["first_step"], result["window"]["last_step"]) == (0, 2)
    assert len(told) == 3
    json.dumps(result)


def test_over_sampling_wastes_what_it_throws_away_and_prefers_short_responses() -> None:
    result = bench_schedule(small("oversample"), progress=lambda line: None)
    assert result["wasted_by_reason"].keys() == {"discarded"}
    assert result["wasted_fraction"] > 0.1
    assert result["length_bias"] < 0.0


def test_partial_rollouts_keep_what_is_cut_off() -> None:
    workload = small("partial", num_steps=6, weight_updates=True)
    result = bench_schedule(workload, progress=lambda line: None)
    assert result["window"]["first_step"] == 4
    assert result["versions"]["updates"] >= 5
    assert result["wasted_fraction"] < 0.2
    assert 0.0 < result["efficiency"] < 1.1


def test_asynchronous_generation_goes_on_while_weights_change() -> None:
    workload = small("async", num_steps=6, weight_updates=True)
    result = bench_schedule(workload, progress=lambda line: None)
    assert result["versions"]["updates"] >= 5
    assert result["versions"]["spanning_share"] > 0.0
    assert result["wasted_fraction"] < 0.2
    assert 0.0 < result["efficiency"] < 1.1


def test_filtered_groups_count_as_wasted() -> None:
    result = bench_schedule(small("sync", filtered_share=0.5), progress=lambda line: None)
    assert result["wasted_by_reason"]["filtered"] > 0.1
    assert result["efficiency_of_possible"] == pytest.approx(2 * result["efficiency"])


def test_tokens_of_a_request_count_as_far_as_it_ran_in_the_window() -> None:
    records = {b"a": [request(0.0, 20.0, 10)], b"b": [request(13.0, 15.0, 4)], b"c": [request(0.0, 10.0, 5)]}
    fates = {key: fate(sum(each.num_tokens for each in requests)) for key, requests in records.items()}
    used, wasted = count_tokens(records, fates, window(10.0, 16.0, generated_tokens=10), step_seconds=1.0)
    assert used == 6 + 4
    assert wasted == {}


def test_tokens_that_are_not_trained_on_have_a_reason() -> None:
    records = {
        b"dropped": [request(0.0, 4.0, 4)],
        b"discarded": [request(0.0, 3.0, 3)],
        b"restarted": [request(0.0, 2.0, 2), request(2.0, 8.0, 6)],
    }
    fates = {b"dropped": fate(4, dropped_as="filtered"), b"restarted": fate(6)}
    used, wasted = count_tokens(records, fates, window(0.0, 10.0, generated_tokens=20), step_seconds=1.0)
    assert used == 6
    assert wasted == {"filtered": 4, "discarded": 3, "restarted": 2, "unreturned": 5}


def test_what_the_model_was_told_between_its_turns_is_not_a_part_of_a_length() -> None:
    told = replace(make_sample("abcdef"), loss_mask=np.array([1, 1, 0, 0, 1, 1], np.float32))
    group = make_group([0.0])
    group = replace(group, rollouts=(replace(group.rollouts[0], samples=(told,)),))
    batch = SimpleNamespace(step=3, groups=[group], samples=[told], policy_version=0)
    log = CommitLog()
    log.add(SimpleNamespace(batch=batch, dropped=[], state=SimpleNamespace(requeued=[], in_flight=[], surplus=[])))
    assert list(log.fates.values()) == [fate(4, step=3)]


def test_lengths_compare_what_was_trained_in_time_with_all_that_was_drawn() -> None:
    workload = small("async")
    prompts = [NumberedPrompts(prompt_tokens=15, seed=0).prompt(number) for number in range(4)]
    keys = [prompt.token_ids.tobytes() for prompt in prompts]
    fates = {
        keys[0]: fate(10, 20),
        keys[1]: fate(50, 60, step=1),
        keys[3]: fate(7, 7, step=1),
    }
    trained, drawn = lengths(workload, window(0.0, 1.0, num_drawn=3), {keys[2]: [5, 6]}, fates)
    assert trained == [10, 20]
    discarded = [draw_length(workload.time_model, prompts[2].token_ids, seed) for seed in (5, 6)]
    assert drawn == [10, 20, 50, 60, *discarded]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.75])
def test_the_filter_drops_its_share_of_any_prompts_in_a_row(share: float) -> None:
    decide = drop_share(share)
    for first in (0, 777):
        samples = [replace(make_sample(), metadata={"number": first + number}) for number in range(200)]
        dropped = sum(isinstance(decide([sample]), Drop) for sample in samples)
        assert dropped == pytest.approx(200 * share, abs=2)


def test_the_quick_tokenizer_decodes_as_the_plain_one_does() -> None:
    token_ids = [END_OF_TURN, 104, 105, 46_480, 20_481, END_OF_TURN]
    for skips in (False, True):
        text = CharTokenizer().decode(token_ids, skip_special_tokens=skips)
        assert QuickTokenizer().decode(token_ids, skip_special_tokens=skips) == text


def test_no_two_prompts_are_alike() -> None:
    source = NumberedPrompts(prompt_tokens=15, seed=3)
    prompts = [source.prompt(number) for number in (1, 11, 111, 100_000)]
    assert len({prompt.text for prompt in prompts}) == 4
    assert {len(prompt.token_ids) for prompt in prompts} == {15}


def test_groups_in_flight_fill_the_slots_with_a_reserve() -> None:
    workload = ScheduleWorkload(mode=ScheduleMode.ASYNC, num_steps=1)
    random = np.random.default_rng(1)
    responses = np.exp(random.normal(0, 0.6, (10_000, 1)) + random.normal(0, 0.6, (10_000, 8)))
    filling = 256 / 8 * np.minimum(responses, 8.19).max(axis=1).mean() / np.minimum(responses, 8.19).mean()
    assert workload.groups_in_flight == pytest.approx(1.25 * filling, rel=0.05)
    assert ScheduleWorkload(mode=ScheduleMode.SYNC, num_steps=1).groups_in_flight == 32
    assert ScheduleWorkload(mode=ScheduleMode.OVERSAMPLE, num_steps=1).groups_in_flight == 64


def test_the_published_size_has_responses_ten_times_as_long() -> None:
    published = ScheduleWorkload.published(mode=ScheduleMode.ASYNC, num_steps=1, num_engines=2)
    assert (published.median_length, published.max_length, published.num_engines) == (2_000, 16_384, 2)
    assert math.isclose(published.prefill_us_per_token, 20.0)


def test_the_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "schedule", "--help"])
    assert ended.value.code == exit_codes.DONE
    assert "example: rollfeed bench schedule --mode" in " ".join(capsys.readouterr().out.split())


def test_a_share_that_filters_everything_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "schedule", "--mode", "sync", "--filtered", "1"]) == exit_codes.USAGE
    assert "--filtered 1.0" in capsys.readouterr().err
