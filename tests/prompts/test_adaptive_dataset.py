from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from rollfeed.errors import ConfigError
from rollfeed.prompts import AdaptiveDatasetSource, ChatRenderer, DatasetSource, load_prompts
from rollfeed.prompts.row_estimates import RowEstimates
from rollfeed.testing import check_prompt_source, make_group
from rollfeed.types import Correct, Group, Prompt, Rollout, Verdict, VersionSpan

Write = Callable[..., str]
Make = Callable[..., AdaptiveDatasetSource]
NUM_ROWS = 60


@pytest.fixture
def make_source(write_jsonl: Write, renderer: ChatRenderer) -> Make:
    path = write_jsonl([{"prompt": f"question {number}"} for number in range(NUM_ROWS)])

    def make(path: str = path, **settings: Any) -> AdaptiveDatasetSource:
        return AdaptiveDatasetSource(load_prompts(path, renderer=renderer), **{"group_size": 8, "seed": 1} | settings)

    return make


def answered(prompt: Prompt, verdicts: Sequence[Verdict], *, version: int) -> Group:
    group = make_group([0.0] * len(verdicts), prompt=prompt)
    rollouts = []
    for rollout, verdict in zip(group.rollouts, verdicts, strict=True):
        (sample,) = rollout.samples
        spans = (VersionSpan(0, sample.response_length, version),)
        rollouts.append(replace(rollout, samples=(replace(sample, version_spans=spans),), verdict=verdict))
    return replace(group, rollouts=tuple(rollouts))


def judged(prompt: Prompt, num_right: int, *, version: int = 0, size: int = 8) -> Group:
    verdicts = [Verdict.graded(number < num_right) for number in range(size)]
    return answered(prompt, verdicts, version=version)


def row_of(prompt: Prompt) -> int:
    return int(prompt.prompt_id.split("/")[1].split("@")[0])


async def run(
    source: AdaptiveDatasetSource, steps: int, *, rights: Callable[[int], int], version: int = 0
) -> Counter[int]:
    """Draw and answer batches of 10; return how often each row came."""
    came: Counter[int] = Counter()
    for _ in range(steps):
        drawn = await source.draw(10)
        came.update(map(row_of, drawn))
        for prompt in drawn:
            source.learn(judged(prompt, rights(row_of(prompt)), version=version))
        source.end_step()
    return came


def a_third_teaches(row: int) -> int:
    return (0, 4, 8)[row % 3]


async def test_rows_that_are_always_or_never_solved_are_drawn_less_and_not_never(make_source: Make) -> None:
    source = make_source()
    came = await run(source, 180, rights=a_third_teaches)
    shares = [sum(count for row, count in came.items() if row % 3 == kind) / came.total() for kind in range(3)]
    assert shares[1] > 0.7
    assert 0.02 < shares[0] < 0.15
    assert 0.02 < shares[2] < 0.15
    assert len(came) == NUM_ROWS
    metrics = source.metrics()
    assert metrics["datasets/train/num_known"] == NUM_ROWS
    assert metrics["datasets/train/num_passed_over"] > 500


async def test_until_something_is_known_the_order_is_that_of_a_plain_data_set(make_source: Make) -> None:
    adaptive = make_source(rollout_shuffle=True)
    plain = DatasetSource(adaptive.loaded, seed=1, rollout_shuffle=True)
    drawn = [[prompt.prompt_id for prompt in await each.draw(150)] for each in (adaptive, plain)]
    assert drawn[0] == drawn[1]


async def test_rows_come_back_as_the_policy_changes(make_source: Make) -> None:
    source = make_source()
    for prompt in await source.draw(NUM_ROWS):
        source.learn(judged(prompt, 0, version=1))
    source.end_step()

    def asked() -> float:
        return sum(source._estimates.chance(row) for row in range(NUM_ROWS)) / NUM_ROWS

    at_first = asked()
    assert at_first < 0.3
    for _ in range(300):  # batches of the same weights, which forget nothing
        source.end_step()
    assert asked() == at_first
    (prompt,) = await source.draw(1)
    for version in range(2, 402):
        source.learn(judged(prompt, 4, version=version))
        source.end_step()
    assert asked() > 0.8


async def test_answers_that_nothing_was_said_of_teach_nothing(
    make_source: Make, caplog: pytest.LogCaptureFixture
) -> None:
    source = make_source()
    (prompt,) = await source.draw(1)
    source.learn(answered(prompt, [Verdict.failed("no grader")] * 4 + [Verdict.graded(True)] * 4, version=0))
    source.end_step()
    assert source._estimates._counts(0) == (4.0, 0.0)
    assert not caplog.records
    for prompt in await source.draw(2):
        source.learn(answered(prompt, [Verdict(reward=1.0, correct=Correct.UNDEFINED)] * 8, version=0))
    assert [record.message for record in caplog.records] == [
        "data set train: no verdict says whether answers are right, so that all its rows are drawn alike: have the "
        "reward function return a Verdict with correct, or set adaptive = false"
    ]
    assert source.metrics()["datasets/train/num_known"] == 1


async def test_a_source_goes_on_exactly_where_its_state_was_taken(make_source: Make) -> None:
    random, source = Random(3), make_source(rollout_shuffle=True)
    for version in range(40):
        if random.random() < 0.5:
            restored = make_source(rollout_shuffle=True)
            restored.load_state_dict(json.loads(json.dumps(source.state_dict())))
            assert restored.state_dict() == source.state_dict()
            assert restored.metrics() == source.metrics()
            ahead = [[prompt.prompt_id for prompt in await each.draw(30)] for each in (source, restored)]
            assert ahead[0] == ahead[1]
            source = restored
        for prompt in await source.draw(random.randint(1, 20)):
            source.learn(judged(prompt, random.choice([0, 0, 3, 8]), version=version))
        source.end_step()


async def test_it_keeps_the_contract_of_sources(make_source: Make) -> None:
    await check_prompt_source(make_source)


async def test_an_epoch_passes_every_row_once(make_source: Make) -> None:
    source = make_source(num_epoch=2)
    first = await source.draw(NUM_ROWS)
    assert [row_of(prompt) for prompt in first] == list(range(NUM_ROWS))
    for _ in range(2):
        for prompt in first:
            source.learn(judged(prompt, 8))
    source.end_step()
    second = await source.draw(NUM_ROWS)
    assert 0 < len(second) < NUM_ROWS / 2
    assert len({prompt.prompt_id for prompt in second}) == len(second)
    assert source.metrics()["datasets/train/num_passed_over"] == NUM_ROWS - len(second)


async def test_rows_of_a_slice_are_told_from_each_other(
    write_jsonl: Write, make_renderer: Callable[[int], ChatRenderer]
) -> None:
    path = write_jsonl([{"prompt": "x" * (number % 2 * 100 + number)} for number in range(1, 41)], "sliced.jsonl")
    loaded = load_prompts(f"{path}@[10:]", renderer=make_renderer(155))
    assert loaded.num_over_length
    source = AdaptiveDatasetSource(loaded, group_size=8, seed=1)
    for place, prompt in enumerate(await source.draw(len(source))):
        if place % 2:
            source.learn(judged(prompt, 0))
    chances = [source._estimates.chance(row) for row in range(len(source))]
    assert [chance < 1 for chance in chances] == [bool(row % 2) for row in range(len(source))]


async def test_a_data_set_that_shrank_is_refused(make_source: Make, write_jsonl: Write) -> None:
    state = make_source().state_dict()
    shorter = write_jsonl([{"prompt": f"question {number}"} for number in range(NUM_ROWS - 1)])
    with pytest.raises(ConfigError, match="num_rows is 59, but the run began with 60: restore the file"):
        make_source(shorter).load_state_dict(state)


def test_states_share_all_but_a_few_of_their_bytes() -> None:
    """What is new in the state of a step is about what was learned in it, also of 10 million rows."""
    estimates, random = RowEstimates(10_000_000, group_size=8), Random(0)
    assert estimates._known.nbytes == 80_000_000
    before: set[str] = set()
    new_bytes = 0
    for version in range(256):
        for _ in range(64):
            estimates.observe(random.randrange(10_000_000), [True, False], version=version)
        estimates.end_step()
        segments = estimates.state_dict()["segments"]
        new_bytes += sum(len(segment) for segment in segments if segment not in before)
        before = set(segments)
        assert len(segments) <= 9
    num_rows = 256 * 64
    assert sum(map(len, before)) <= 17 * num_rows
    assert new_bytes < 17 * num_rows * 9


def test_a_row_that_was_answered_for_ever_still_has_a_count() -> None:
    estimates = RowEstimates(1, group_size=1)
    for _ in range(40):
        estimates.observe(0, [True] * 10_000, version=0)
    assert estimates.chance(0) == 0.05
    restored = RowEstimates(1, group_size=1)
    restored.load_state_dict(estimates.state_dict())
    assert restored.chance(0) == 0.05


def test_group_of_no_judgement_has_none() -> None:
    prompt = make_group([0.0]).prompt
    scored = answered(prompt, [Verdict.graded(True), Verdict.graded(False), Verdict.failed("x")], version=0)
    unscored = Rollout(rollout_id=9, samples=scored.samples[:1])
    assert replace(scored, rollouts=(*scored.rollouts, unscored)).judged() == [True, False]
