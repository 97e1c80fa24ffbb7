import logging
import random
from collections.abc import Sequence

import pytest

from rollfeed.config import RolloutSettings
from rollfeed.errors import RunFailedError
from rollfeed.pipeline.groups import FailureBudget
from rollfeed.protocols import Scorer
from rollfeed.testing import ListSource, ScriptedEngine
from rollfeed.types import Outcome, Prompt, Rollout, RunState, StepCommit, Verdict


def budget(settled: Sequence[bool] = (), **settings: float) -> FailureBudget:
    return FailureBudget(RolloutSettings(**settings), settled=settled)


def record(failures: FailureBudget, outcomes: Sequence[bool]) -> int | None:
    """Record outcomes, each of a group of its own, and return at which one the run ends."""
    for number, ended_well in enumerate(outcomes):
        try:
            failures.succeed(number) if ended_well else failures.fail(number, "broken", where=f"prompt {number}")
        except RunFailedError:
            return number
    return None


def test_a_judge_that_fails_one_call_in_forty_never_ends_a_run() -> None:
    for seed in range(10):
        fails = random.Random(seed)
        assert record(budget(), [fails.random() >= 1 / 40 for _ in range(20_000)]) is None


def test_a_run_whose_first_rollouts_all_fail_stops_at_the_minimum() -> None:
    assert record(budget(), [False] * 17) == 15
    assert record(budget(failure_minimum=3), [False] * 17) == 2


def test_a_share_above_the_budget_stops_the_run_and_one_below_does_not() -> None:
    assert record(budget(), ([True] * 6 + [False]) * 100) == 16 * 7 - 1
    assert record(budget(), ([True] * 10 + [False]) * 100) is None
    assert record(budget(failure_budget=0.2), ([True] * 6 + [False]) * 100) is None
    assert record(budget(failure_budget=1.0), [False] * 100) is None


def test_failures_leave_the_window() -> None:
    burst, calm = [False] * 15, [True] * 512
    assert record(budget(), (burst + calm) * 5) is None
    assert record(budget(failure_window=2000), (burst + calm) * 5 + [False] * 60) is None
    assert record(budget(failure_window=64, failure_minimum=8), [True] * 64 + [False] * 8) == 71


def test_no_failure_is_allowed_where_the_budget_says_so() -> None:
    assert record(budget(failure_budget=0.0, failure_minimum=1), [True, True, False]) == 2


def test_outcomes_of_earlier_processes_count() -> None:
    assert record(budget([True] * 100 + [False] * 15), [False]) == 0
    assert record(budget([False] * 15 + [True] * 600), [False]) is None


def test_what_is_said_is_the_first_cause_and_how_many_there_were_of_its_kind(caplog) -> None:
    failures = budget()
    failures.fail(0, "no answer after 3 s", where="prompt a")
    for number in range(3):
        failures.fail(number, f"broken by {number}", where=f"prompt {number}")
    for number in range(11):
        failures.fail(number, f"no answer after {number} s", where="prompt b")
    with pytest.raises(RunFailedError) as caught:
        failures.fail(11, "no answer after 11 s", where="prompt b")
    assert str(caught.value) == (
        "16 of the last 16 rollouts failed, more than rollout.failure_budget = 0.1 of them; the first one: prompt a: "
        "no answer after 3 s (and 12 more like it)"
    )
    assert caplog.messages == ["rollout failed: prompt 0: broken by 0 (and 2 more like it)"]


def test_failures_are_logged_once_a_cause_with_their_number(caplog) -> None:
    failures = budget(failure_budget=1.0)
    for number in range(1000):
        failures.fail(number, f"cause {'abcdef'[number % 5]}", where=f"prompt {number}")
    with caplog.at_level(logging.WARNING):
        failures.report()
        failures.report()
    assert caplog.messages == [
        *(f"rollout failed: prompt {number}: cause {name} (and 199 more like it)" for number, name in enumerate("abc")),
        "400 more rollouts failed, for 2 other causes",
    ]


def test_what_is_committed_does_not_depend_on_the_order_in_which_rollouts_ended() -> None:
    outcomes = [(group, (group + member) % 5 != 0) for group in range(20) for member in range(4)]
    committed = []
    for seed in range(5):
        failures = budget(failure_budget=1.0)
        for group, ended_well in random.Random(seed).sample(outcomes, len(outcomes)):
            failures.succeed(group) if ended_well else failures.fail(group, "broken", where="")
        first = failures.settle(range(12), in_flight=range(12, 18))  # 18 and 19 are answered again
        committed.append((first, failures.settle(range(12, 20))))
    assert committed == committed[:1] * 5
    assert [len(each) for each in committed[0]] == [48, 72]


class JudgeThatFails(Scorer):
    def __init__(self, one_in: int) -> None:
        self.num_calls = 0
        self._one_in = one_in

    async def score(self, rollouts: Sequence[Rollout], prompt: Prompt) -> list[Verdict]:
        return [self._one() for _ in rollouts]

    def _one(self) -> Verdict:
        self.num_calls += 1
        if self.num_calls % self._one_in == 0:
            return Verdict(reward=None, outcome=Outcome.ERROR, detail="overloaded")
        return Verdict(reward=1.0)


def prompts() -> ListSource:
    return ListSource([f"prompt {number}" for number in range(10)], repeat=True)


async def test_a_run_outlives_any_number_of_failures_that_are_few_among_many(make_rollouts) -> None:
    judge = JudgeThatFails(one_in=40)
    async with make_rollouts(ScriptedEngine(), scorer=judge, rollout_batch_size=8) as rollouts:
        for _ in range(100):
            await rollouts.generate_batch()
    assert judge.num_calls > 40 * 17


async def test_a_run_cannot_dodge_the_budget_by_starting_again(make_rollouts) -> None:
    commits: list[StepCommit] = []
    state: RunState | None = None
    judge = JudgeThatFails(one_in=5)

    async def run_one_step() -> None:
        async with make_rollouts(
            ScriptedEngine(),
            source=prompts(),
            scorer=judge,
            rollout_batch_size=2,
            state=state,
            commit=commits.append,
        ) as rollouts:
            await rollouts.generate_batch()

    async def run_many_steps() -> None:
        nonlocal state
        for _ in range(20):
            await run_one_step()
            state = commits[-1].state

    with pytest.raises(RunFailedError, match=r"rollout.failure_budget = 0.1 of them; the first one: .*overloaded"):
        await run_many_steps()
    assert 3 < len(commits) < 20


async def test_deterministic_runs_leave_the_same_outcomes_whatever_ended_first(make_rollouts) -> None:
    found = []
    for order in range(3):
        commits: list[StepCommit] = []

        async def generate(request, *, services):
            if request.rollout_id % 7 == 0:
                raise ValueError("unlucky")
            return await services.default(request, services=services)

        async with make_rollouts(
            ScriptedEngine(random_order=order),
            source=prompts(),
            generate_fn=generate,
            deterministic=True,
            over_sampling_factor=2.0,
            failure_budget=1.0,
            commit=commits.append,
        ) as rollouts:
            for _ in range(4):
                await rollouts.generate_batch()
        found.append([commit.state.outcomes for commit in commits])
    assert found == found[:1] * 3
    assert False in found[0][-1]


async def test_rollouts_of_a_group_that_failed_count_as_the_successes_they_are(make_rollouts) -> None:
    commits: list[StepCommit] = []

    async def generate(request, *, services):
        if request.rollout_id == 3:
            raise ValueError("once")
        return await services.default(request, services=services)

    async with make_rollouts(
        ScriptedEngine(),
        source=prompts(),
        generate_fn=generate,
        n_samples_per_prompt=8,
        rollout_batch_size=1,
        commit=commits.append,
    ) as rollouts:
        await rollouts.generate_batch()
    assert commits[0].state.outcomes == (False, *[True] * 15)


async def test_a_call_that_was_to_score_a_whole_group_is_one_failure(make_rollouts) -> None:
    class Together(Scorer):
        def scores_alone(self, rollout: Rollout, prompt: Prompt) -> bool:
            return False

        async def score(self, rollouts: Sequence[Rollout], prompt: Prompt) -> list[Verdict]:
            if prompt.prompt_id == "list/0@e0":
                return [Verdict(reward=None, outcome=Outcome.ERROR, detail="down")] * len(rollouts)
            return [Verdict(reward=1.0) for _ in rollouts]

    commits: list[StepCommit] = []
    async with make_rollouts(
        ScriptedEngine(), scorer=Together(), n_samples_per_prompt=32, rollout_batch_size=1, commit=commits.append
    ) as rollouts:
        await rollouts.generate_batch()
    assert commits[0].state.outcomes == (False, *[True] * 32)
