from __future__ import annotations

import asyncio
import functools
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollfeed.errors import ConfigError, WorkerDiedError, WorkerTimeoutError
from rollfeed.rewards.hub import RewardHub
from rollfeed.rewards.registry import BUILTIN_GRADERS, BuiltinGrader
from rollfeed.testing.virtual_loop import run_in_virtual_time
from rollfeed.types import Correct, Outcome, Prompt, Rollout, Sample, SampleStatus, Verdict

MakePrompt = Callable[..., Prompt]
MakeRollout = Callable[..., Rollout]


def hub(**settings: Any) -> RewardHub:
    patient = {"timeout_seconds": 60.0, "worker_timeout_seconds": 60.0}
    return RewardHub(**{"graders": BUILTIN_GRADERS, **patient} | settings)


@pytest.fixture
def prompt(make_prompt: MakePrompt) -> Prompt:
    return make_prompt(label="4")


@pytest.fixture
def group(make_rollout: MakeRollout) -> list[Rollout]:
    return [make_rollout(7, "4"), make_rollout(8, "five"), make_rollout(9, "3")]


def rewards(verdicts: Sequence[Verdict]) -> list[Any]:
    return [verdict.reward for verdict in verdicts]


def reward_by_length(sample: Sample, prompt: Prompt) -> float:
    return float(len(sample.response))


# Who scores


async def test_grader_of_the_settings_scores_every_rollout_in_order(group: list[Rollout], prompt: Prompt) -> None:
    verdicts = await hub(rm_type="number").score(group, prompt)
    assert rewards(verdicts) == [1.0, 0.0, 0.0]
    assert [verdict.format_ok for verdict in verdicts] == [True, False, True]


async def test_grader_of_the_prompt_comes_before_that_of_the_settings(
    group: list[Rollout], make_prompt: MakePrompt
) -> None:
    assert rewards(await hub(rm_type="number").score(group, make_prompt("five", rm_type="exact"))) == [0.0, 1.0, 0.0]


async def test_custom_function_comes_before_every_grader(group: list[Rollout], make_prompt: MakePrompt) -> None:
    scorer = hub(rm_type="number", reward_fn=reward_by_length)
    assert rewards(await scorer.score(group, make_prompt("4", rm_type="exact"))) == [1.0, 4.0, 1.0]


async def test_prompts_that_bring_their_verifier_are_not_for_the_custom_function(
    group: list[Rollout], make_prompt: MakePrompt
) -> None:
    def verify(response: str, label: Any, metadata: Any) -> Verdict:
        return Verdict(reward=0.5, correct=Correct.YES)

    def several(samples: Sequence[Sample], prompt: Any) -> list[dict[str, float]]:
        return [{"score": 7.0}] * len(samples)

    graders = {**BUILTIN_GRADERS, "environment": verify}
    for function in (
        {"reward_fn": lambda sample, prompt: {"score": 7.0}},
        {"batched_reward_fn": several},
        {"group_reward_fn": several},
    ):
        scorer = hub(graders=graders, own_verifiers=["environment"], reward_key="score", **function)
        assert rewards(await scorer.score(group, make_prompt(rm_type="environment"))) == [0.5] * 3
        for metadata in ({}, {"rm_type": "exact"}, {"rm_type": ["environment"]}):
            assert rewards(await scorer.score(group, make_prompt("4", **metadata))) == [{"score": 7.0}] * 3
        overriding = hub(graders=graders, reward_key="score", **function)
        assert rewards(await overriding.score(group, make_prompt(rm_type="environment"))) == [{"score": 7.0}] * 3


async def test_functions_that_are_named_come_before_the_verifier_of_a_prompt(
    group: list[Rollout], make_prompt: MakePrompt
) -> None:
    named = {"length": reward_by_length}
    scorer = hub(own_verifiers=["environment"], reward_fn=lambda sample, prompt: -1.0, named_reward_fns=named)
    prompt = make_prompt("4", rm_type="environment", reward_fn="length")
    assert rewards(await scorer.score(group, prompt)) == [1.0, 4.0, 1.0]


async def test_further_graders_come_by_mapping(group: list[Rollout], make_prompt: MakePrompt) -> None:
    def shout(response: str, label: Any, metadata: Any) -> Verdict:
        return Verdict(reward=metadata["loud"], correct=Correct.YES)

    scorer = hub(graders={**BUILTIN_GRADERS, "shout": shout})
    assert rewards(await scorer.score(group, make_prompt(rm_type="shout", loud=3.0))) == [3.0, 3.0, 3.0]


async def test_unknown_grader_of_a_prompt_is_an_error_with_the_known_ones(
    group: list[Rollout], make_prompt: MakePrompt
) -> None:
    for verdict in await hub(rm_type="number").score(group, make_prompt(rm_type="nunber")):
        assert verdict.outcome is Outcome.ERROR
        assert "rm_type = 'nunber': no such grader" in verdict.detail
        assert "did you mean number?" in verdict.detail


async def test_prompt_without_any_grader_is_an_error(group: list[Rollout], prompt: Prompt) -> None:
    assert {verdict.outcome for verdict in await hub().score(group, prompt)} == {Outcome.ERROR}


def test_unknown_grader_of_the_settings_is_refused() -> None:
    with pytest.raises(ConfigError, match="rm_type = 'exakt': no such grader; did you mean exact"):
        hub(rm_type="exakt")


def test_two_custom_functions_are_refused() -> None:
    with pytest.raises(ConfigError, match="set one of them"):
        hub(reward_fn=reward_by_length, group_reward_fn=lambda samples, prompt: [])


# What a function may be


class AsyncObject:
    async def __call__(self, sample: Sample, prompt: Prompt) -> float:
        await asyncio.sleep(0)
        return 2.0


async def scaled(sample: Sample, prompt: Prompt, *, scale: float) -> float:
    return scale


@pytest.mark.parametrize(
    "function",
    [
        lambda sample, prompt: 2,
        AsyncObject(),
        functools.partial(scaled, scale=2.0),
        lambda sample, prompt: scaled(sample, prompt, scale=2.0),
    ],
    ids=["plain", "async object", "async partial", "plain that returns an awaitable"],
)
async def test_plain_and_async_functions_work_alike(function: Any, group: list[Rollout], prompt: Prompt) -> None:
    assert rewards(await hub(reward_fn=function).score(group, prompt)) == [2.0, 2.0, 2.0]


async def test_plain_functions_leave_the_event_loop_free(group: list[Rollout], prompt: Prompt) -> None:
    meeting = threading.Barrier(4, timeout=60.0)
    loop = asyncio.get_running_loop()

    def wait_for_the_others(sample: Sample, prompt: Prompt) -> float:
        meeting.wait()
        return 1.0

    scoring = asyncio.create_task(hub(reward_fn=wait_for_the_others).score(group, prompt))
    await loop.run_in_executor(None, meeting.wait)
    assert rewards(await scoring) == [1.0, 1.0, 1.0]


async def most_at_once(scorer: RewardHub, count: int, prompt: Prompt, make_rollout: MakeRollout) -> None:
    verdicts = await asyncio.gather(*(scorer.score([make_rollout(each, "a")], prompt) for each in range(count)))
    assert {verdict.reward for (verdict,) in verdicts} == {1.0}


@pytest.mark.parametrize("returns_awaitable", [False, True], ids=["async", "plain that returns an awaitable"])
async def test_async_functions_run_as_many_at_once_as_are_called(
    make_rollout: MakeRollout, prompt: Prompt, returns_awaitable: bool
) -> None:
    everybody = asyncio.Barrier(256)

    async def function(sample: Sample, prompt: Prompt) -> float:
        await everybody.wait()
        return 1.0

    chosen = (lambda sample, prompt: function(sample, prompt)) if returns_awaitable else function
    await most_at_once(hub(reward_fn=chosen), 256, prompt, make_rollout)


async def test_concurrency_bounds_the_calls_of_async_functions(make_rollout: MakeRollout, prompt: Prompt) -> None:
    running = peak = 0

    async def function(sample: Sample, prompt: Prompt) -> float:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        for _ in range(3):
            await asyncio.sleep(0)
        running -= 1
        return 1.0

    await most_at_once(hub(reward_fn=function, concurrency=3), 20, prompt, make_rollout)
    assert peak == 3


@pytest.mark.parametrize(("concurrency", "most"), [(None, 32), (2, 2)])
async def test_concurrency_bounds_the_threads_of_plain_functions(
    make_rollout: MakeRollout, prompt: Prompt, concurrency: int | None, most: int
) -> None:
    running, peak, lock, full = 0, 0, threading.Lock(), threading.Event()

    def function(sample: Sample, prompt: Prompt) -> float:
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
            if running >= most:
                full.set()
        full.wait()
        with lock:
            running -= 1
        return 1.0

    await most_at_once(hub(reward_fn=function, concurrency=concurrency), 40, prompt, make_rollout)
    assert peak == most


async def test_batched_function_scores_the_rollouts_in_one_call(group: list[Rollout], prompt: Prompt) -> None:
    calls: list[tuple[list[int], int]] = []

    def function(samples: Sequence[Sample], prompts: Sequence[Prompt]) -> list[float]:
        calls.append(([sample.rollout_id for sample in samples], len(prompts)))
        return [float(sample.rollout_id) for sample in samples]

    assert rewards(await hub(batched_reward_fn=function).score(group, prompt)) == [7.0, 8.0, 9.0]
    assert calls == [([7, 8, 9], 3)]


async def test_group_function_sees_all_samples_at_once(group: list[Rollout], prompt: Prompt) -> None:
    async def rank(samples: Sequence[Sample], prompt: Prompt) -> np.ndarray:
        lengths = np.array([len(sample.response) for sample in samples], np.float64)
        return lengths / lengths.sum()

    assert rewards(await hub(group_reward_fn=rank).score(group, prompt)) == [1 / 6, 4 / 6, 1 / 6]


async def test_forks_of_a_rollout_are_scored_once_by_the_last(make_rollout: MakeRollout, prompt: Prompt) -> None:
    seen: list[str] = []

    def function(sample: Sample, prompt: Prompt) -> float:
        seen.append(sample.response)
        return 1.0

    (verdict,) = await hub(reward_fn=function).score([make_rollout(1, "first", "last")], prompt)
    assert seen == ["last"]
    assert [s.reward for s in make_rollout(1, "first", "last").with_reward(verdict).samples] == [1.0, 1.0]


# What carries a reward, and what has not finished


async def test_rewards_that_are_carried_are_kept(make_rollout: MakeRollout, prompt: Prompt) -> None:
    scored = make_rollout(1, "4").with_reward(Verdict(reward=0.25, correct=Correct.NO))
    group = [scored, make_rollout(2, "abc"), make_rollout(3, "4", reward=0.0)]
    for settings, expected in [
        ({"reward_fn": reward_by_length}, [0.25, 3.0, 0.0]),
        ({"batched_reward_fn": lambda samples, prompts: [9] * len(samples)}, [0.25, 9.0, 0.0]),
        ({"group_reward_fn": lambda samples, prompt: [7, 8, 9]}, [0.25, 8.0, 0.0]),
    ]:
        verdicts = await hub(**settings).score(group, prompt)
        assert rewards(verdicts) == expected
        assert verdicts[0].correct is Correct.NO


async def test_group_with_all_rewards_is_not_scored_again(make_rollout: MakeRollout, prompt: Prompt) -> None:
    def function(samples: Any, prompt: Any) -> Any:
        raise AssertionError("called")

    group = [make_rollout(1, "a", reward=1.0), make_rollout(2, "b", reward=2.0)]
    assert rewards(await hub(group_reward_fn=function).score(group, prompt)) == [1.0, 2.0]


@pytest.mark.parametrize("reward", [float("nan"), "good", {}, {"bonus": 1.0}, {"score": None}])
async def test_carried_reward_that_is_none_is_an_error_of_its_rollout(
    make_rollout: MakeRollout, prompt: Prompt, reward: Any
) -> None:
    group = [make_rollout(1, "a", reward=reward), make_rollout(2, "b", reward={"score": 0.5})]
    verdicts = await hub(reward_fn=reward_by_length, reward_key="score").score(group, prompt)
    assert rewards(verdicts) == [None, {"score": 0.5}]
    assert verdicts[0].outcome is Outcome.ERROR


async def test_only_functions_that_take_several_wait_for_a_group(
    make_rollout: MakeRollout, make_prompt: MakePrompt
) -> None:
    several: Any = {"own_verifiers": ["environment"], "named_reward_fns": {"length": reward_by_length}}
    for name in ("group_reward_fn", "batched_reward_fn"):
        scorer = hub(**{name: lambda *_: []}, **several)
        assert not scorer.scores_alone(make_rollout(1, "a"), make_prompt())
        assert scorer.scores_alone(make_rollout(1, "a"), make_prompt(rm_type="environment"))
        assert scorer.scores_alone(make_rollout(1, "a"), make_prompt(reward_fn="length"))
    for settings in ({"rm_type": "exact"}, {"reward_fn": reward_by_length}):
        assert hub(**settings).scores_alone(make_rollout(1, "a"), make_prompt())


@pytest.mark.parametrize("status", [SampleStatus.ABORTED, SampleStatus.FAILED, SampleStatus.PENDING])
async def test_unfinished_member_keeps_a_group_from_being_scored(
    make_rollout: MakeRollout, prompt: Prompt, status: SampleStatus
) -> None:
    def function(samples: Any, prompt: Any) -> Any:
        raise AssertionError("called")

    group = [make_rollout(1, "a"), make_rollout(2, "b", status=status)]
    for name in ("group_reward_fn", "batched_reward_fn"):
        for verdict in await hub(**{name: function}).score(group, prompt):
            assert verdict.detail == f"not scored: rollout 2 of the group is {status.value}"
    verdicts = await hub(reward_fn=reward_by_length).score(group, prompt)
    assert rewards(verdicts) == [1.0, None]
    assert verdicts[1].outcome is Outcome.ERROR


async def test_truncated_rollouts_are_scored(make_rollout: MakeRollout, prompt: Prompt) -> None:
    group = [make_rollout(1, "4", status=SampleStatus.TRUNCATED)]
    assert rewards(await hub(rm_type="exact").score(group, prompt)) == [1.0]


async def test_rollout_without_samples_counts_as_failed(prompt: Prompt) -> None:
    (verdict,) = await hub(rm_type="exact").score([Rollout(rollout_id=1, samples=())], prompt)
    assert verdict.outcome is Outcome.ERROR


# What goes wrong


def fail(error: BaseException) -> Any:
    raise error


def told(setting: str, function: Callable[..., Any], detail: str) -> str:
    return f"{setting} ({function.__module__}:{function.__qualname__}): {detail}"


def shown_here() -> Path:
    path = Path(__file__)
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def place_of_fail() -> str:
    return f"{shown_here()}:{fail.__code__.co_firstlineno + 1}, in fail"


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero"),
        (TimeoutError("its own"), "TimeoutError: its own"),
        (StopIteration(), "StopIteration"),
        (asyncio.CancelledError("its own"), "CancelledError: its own"),
    ],
)
async def test_exception_fails_its_own_rollout_with_the_cause(
    group: list[Rollout], prompt: Prompt, error: Exception, detail: str
) -> None:
    def plain(sample: Sample, prompt: Prompt) -> float:
        return fail(error) if sample.rollout_id == 8 else 1.0

    async def asynchronous(sample: Sample, prompt: Prompt) -> float:
        return plain(sample, prompt)

    for function in (plain, asynchronous) if not isinstance(error, StopIteration) else (plain,):
        verdicts = await hub(reward_fn=function).score(group, prompt)
        assert rewards(verdicts) == [1.0, None, 1.0]
        assert verdicts[1].outcome is Outcome.ERROR
        assert verdicts[1].detail == told("plugins.reward", function, f"{detail} ({place_of_fail()})")


async def test_exit_in_a_reward_function_does_not_end_the_run(group: list[Rollout], prompt: Prompt) -> None:
    verdicts = await hub(reward_fn=lambda sample, prompt: fail(SystemExit(1))).score(group, prompt)
    assert all("SystemExit: 1 (" in verdict.detail for verdict in verdicts)


async def test_exception_of_a_group_function_fails_all_members(group: list[Rollout], prompt: Prompt) -> None:
    def broken(samples: Sequence[Sample], prompt: Any) -> list[float]:
        return [fail(KeyError("x"))]

    for name in ("group_reward", "batched_reward"):
        verdicts = await hub(**{f"{name}_fn": broken}).score(group, prompt)
        said = told(f"plugins.{name}", broken, f"KeyError: 'x' ({place_of_fail()})")
        assert [verdict.detail for verdict in verdicts] == [said] * 3


async def test_a_result_that_is_no_reward_names_the_function_and_where_it_is(
    group: list[Rollout], prompt: Prompt
) -> None:
    def wordy(*_: Any) -> str:
        return "good"

    place = f"{shown_here()}:{wordy.__code__.co_firstlineno}"
    verdict = (await hub(reward_fn=wordy).score(group, prompt))[0]
    assert verdict.detail.startswith(told("plugins.reward", wordy, "it returned 'good'"))
    assert verdict.detail.endswith(f"({place})")
    verdict = (await hub(group_reward_fn=wordy).score(group, prompt))[0]
    assert verdict.detail.startswith(told("plugins.group_reward", wordy, "it returned 4 results for 3 rollouts"))
    assert verdict.detail.endswith(f"({place})")
    named = replace(prompt, metadata={"reward_fn": "mine"})
    verdict = (await hub(named_reward_fns={"mine": wordy}).score(group, named))[0]
    assert verdict.detail.startswith(told("reward.functions.mine", wordy, "it returned 'good'"))


class Stuck:
    """Hangs on some rollouts, each in a thread; knows when the others have been scored."""

    def __init__(self, *rollout_ids: int) -> None:
        self._hanging = rollout_ids
        self._release = threading.Event()
        self._threads: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()

    def __enter__(self) -> Callable[[Sample, Prompt], float]:
        def function(sample: Sample, prompt: Prompt) -> float:
            if sample.rollout_id in self._hanging:
                self._release.wait()
            else:
                self._threads.put(threading.current_thread())
            return 1.0

        return function

    def __exit__(self, *_exc_info: object) -> None:
        self._release.set()

    async def wait_for_others(self, count: int) -> None:
        """Return when what so many returned is on its way; no virtual time passes meanwhile."""

        def wait() -> None:
            for _ in range(count):
                self._threads.get(timeout=60.0).join()

        await asyncio.to_thread(wait)


def test_call_over_its_deadline_is_a_timeout_for_that_rollout_only(group: list[Rollout], prompt: Prompt) -> None:
    async def asynchronous(sample: Sample, prompt: Prompt) -> float:
        if sample.rollout_id == 8:
            await asyncio.Event().wait()
        return 1.0

    async def score(function: Any, num_others: int) -> list[Verdict]:
        scoring = asyncio.create_task(hub(reward_fn=function).score(group, prompt))
        await stuck.wait_for_others(num_others)
        return await scoring

    stuck = Stuck(8)
    with stuck as plain:
        for function, num_others in ((plain, 2), (asynchronous, 0)):
            verdicts = run_in_virtual_time(score(function, num_others))
            assert rewards(verdicts) == [1.0, None, 1.0]
            assert verdicts[1].outcome is Outcome.TIMEOUT
            assert verdicts[1].detail.startswith(told("plugins.reward", function, "no result within 60 s"))


def test_stuck_functions_do_not_keep_others_from_running(make_rollout: MakeRollout, prompt: Prompt) -> None:
    group = [make_rollout(number, "a") for number in range(64)]

    async def score(function: Any) -> list[Verdict]:
        scoring = asyncio.create_task(hub(reward_fn=function).score(group, prompt))
        await asyncio.sleep(60.0)  # of virtual time: the first ones have had theirs, and the last ones have their turn
        await stuck.wait_for_others(4)
        return await scoring

    stuck = Stuck(*range(60))
    with stuck as function:
        verdicts = run_in_virtual_time(score(function))
    assert rewards(verdicts) == [None] * 60 + [1.0] * 4


async def test_cancelling_the_scoring_cancels_async_functions(group: list[Rollout], prompt: Prompt) -> None:
    started, cancelled = asyncio.Event(), []

    async def function(sample: Sample, prompt: Prompt) -> float:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(sample.rollout_id)
            raise
        return 1.0

    scoring = asyncio.create_task(hub(reward_fn=function).score(group, prompt))
    await started.wait()
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    assert sorted(cancelled) == [7, 8, 9]


@pytest.mark.parametrize(
    "result", [[1.0], [1.0] * 4, 1.0, None, "abc", {"a": 1.0}, {1.0, 2.0, 3.0}, iter([1.0, 2.0, 3.0])]
)
async def test_group_result_that_is_not_one_each_is_an_error_for_all(
    group: list[Rollout], prompt: Prompt, result: Any
) -> None:
    for name in ("group_reward_fn", "batched_reward_fn"):
        verdicts = await hub(**{name: lambda samples, prompt: result}).score(group, prompt)
        assert {verdict.outcome for verdict in verdicts} == {Outcome.ERROR}
        assert "for 3 rollouts; it must return a list with one result each" in verdicts[0].detail


async def test_bad_element_of_a_group_result_fails_its_member_only(group: list[Rollout], prompt: Prompt) -> None:
    verdicts = await hub(group_reward_fn=lambda samples, prompt: [1, None, 0]).score(group, prompt)
    assert rewards(verdicts) == [1.0, None, 0.0]
    assert "None, a NoneType; it must be a number" in verdicts[1].detail


# Functions by name, keys of a prompt, boxed types


async def test_function_named_by_the_sample_comes_before_all_others(
    group: list[Rollout], make_prompt: MakePrompt
) -> None:
    named = replace(group[1].samples[0], metadata={"reward_fn": "length"})
    group[1] = replace(group[1], samples=(named,))
    scorer = hub(reward_fn=lambda sample, prompt: -1.0, named_reward_fns={"length": reward_by_length})
    assert rewards(await scorer.score(group, make_prompt("4"))) == [-1.0, 4.0, -1.0]


async def test_function_named_by_the_prompt_comes_before_the_configured_one(
    group: list[Rollout], make_prompt: MakePrompt
) -> None:
    scorer = hub(reward_fn=lambda sample, prompt: -1.0, named_reward_fns={"length": reward_by_length})
    assert rewards(await scorer.score(group, make_prompt("4", reward_fn="length"))) == [1.0, 4.0, 1.0]


async def test_function_that_takes_several_gets_only_samples_without_one_of_their_own(
    group: list[Rollout], make_prompt: MakePrompt
) -> None:
    named = replace(group[0].samples[0], metadata={"reward_fn": "length"})
    group[0] = replace(group[0], samples=(named,))

    def batched(samples: Sequence[Sample], prompts: Sequence[Prompt]) -> list[float]:
        return [float(len(samples))] * len(samples)

    scorer = hub(batched_reward_fn=batched, named_reward_fns={"length": reward_by_length})
    assert rewards(await scorer.score(group, make_prompt("4"))) == [1.0, 2.0, 2.0]


async def test_unknown_function_name_is_an_error(group: list[Rollout], make_prompt: MakePrompt) -> None:
    scorer = hub(named_reward_fns={"length": reward_by_length})
    for verdict in await scorer.score(group, make_prompt("4", reward_fn="lenght")):
        assert verdict.outcome is Outcome.ERROR
        assert "did you mean length?" in verdict.detail
    for verdict in await scorer.score(group, make_prompt("4", reward_fn=["length"])):
        assert verdict.outcome is Outcome.ERROR


async def test_reward_key_of_a_prompt_picks_its_entry(group: list[Rollout], make_prompt: MakePrompt) -> None:
    scorer = hub(reward_fn=lambda sample, prompt: {"score": 1, "bonus": 0.0}, reward_key="score")
    assert rewards(await scorer.score(group, make_prompt("4"))) == [{"score": 1.0, "bonus": 0.0}] * 3
    assert rewards(await scorer.score(group, make_prompt("4", reward_key="bonus"))) == [0.0] * 3
    missing = await scorer.score(group, make_prompt("4", reward_key="malus"))
    assert {verdict.outcome for verdict in missing} == {Outcome.ERROR}


async def test_boxed_type_grades_the_box_only(make_rollout: MakeRollout, make_prompt: MakePrompt) -> None:
    answers = [make_rollout(1, r"5 \boxed{4}"), make_rollout(2, "4")]
    assert rewards(await hub(rm_type="boxed_number").score(answers, make_prompt("4"))) == [1.0, 0.0]

    def shout(response: str, label: Any, metadata: Any) -> Verdict:
        return Verdict(reward=float(len(response)))

    scorer = hub(graders={"shout": shout}, rm_type="boxed_shout")
    assert rewards(await scorer.score(answers, make_prompt("4"))) == [1.0, 0.0]


def test_boxed_type_of_no_grader_is_refused() -> None:
    with pytest.raises(ConfigError, match="rm_type = 'boxed_exakt'"):
        hub(rm_type="boxed_exakt")


async def test_random_rewards_derive_from_the_seed_the_prompt_and_the_sample(
    make_rollout: MakeRollout, make_prompt: MakePrompt
) -> None:
    rollouts = [make_rollout(number, "text") for number in range(64)]

    async def drawn(prompt: Prompt, *, seed: int = 1) -> list[Any]:
        return rewards(await hub(rm_type="random", seed=seed).score(rollouts, prompt))

    first = await drawn(make_prompt())
    assert set(first) == {0.0, 1.0}
    assert await drawn(make_prompt()) == first
    assert await drawn(make_prompt(sample_seed=5)) == first
    assert await drawn(make_prompt(), seed=2) != first
    assert await drawn(replace(make_prompt(), prompt_id="q")) != first
    moved = [
        replace(rollout, samples=tuple(replace(sample, group_index=7) for sample in rollout.samples))
        for rollout in rollouts
    ]
    assert rewards(await hub(rm_type="random", seed=1).score(moved, make_prompt())) != first


async def test_graders_are_told_the_prompt_and_the_reward_key_in_force(
    group: list[Rollout], make_prompt: MakePrompt
) -> None:
    seen: list[Any] = []

    def look(response: str, label: Any, metadata: Any) -> Verdict:
        seen.append((metadata.get("prompt_text"), metadata.get("reward_key")))
        return Verdict(reward=1.0)

    for reward_key, prompt in [
        (None, make_prompt()),
        ("score", make_prompt()),
        ("score", make_prompt(reward_key="bonus")),
    ]:
        await hub(graders={"look": look}, rm_type="look", reward_key=reward_key).score(group[:1], prompt)
    scorer = hub(graders={"look": look}, rm_type="look", reward_key="score")
    await scorer.grade("4", None)
    await scorer.grade("4", None, prompt="What?", reward_key="bonus")
    await scorer.grade("4", None, prompt="What?", metadata={"reward_key": "malus"}, reward_key="bonus")
    assert seen == [
        ("?", None),
        ("?", "score"),
        ("?", "bonus"),
        (None, "score"),
        ("What?", "bonus"),
        ("What?", "malus"),
    ]


# Single responses


async def test_single_response_is_graded_with_metadata_as_json_text() -> None:
    graded = await hub(rm_type="exact").grade("Answer: B", "B", metadata='{"rm_type": "gpqa"}')
    assert (graded.reward, graded.extracted) == (1.0, "B")


@pytest.mark.parametrize("response", [None, 5, ["4"]])
async def test_response_that_is_no_text_is_an_error(response: Any) -> None:
    verdict = await hub(rm_type="math").grade(response, "4")
    assert (verdict.outcome, verdict.reward) == (Outcome.ERROR, None)
    assert "the response is" in verdict.detail


@pytest.mark.parametrize("metadata", ["{", "[]", "5", [], 0])
async def test_metadata_that_is_no_mapping_is_an_error(metadata: Any) -> None:
    verdict = await hub(rm_type="math").grade("4", "4", metadata=metadata)
    assert verdict.outcome is Outcome.ERROR
    assert "metadata is" in verdict.detail


# Isolated calls


class ScriptedWorkers:
    """Answers every call with a value, or raises it."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome
        self.calls: list[tuple[Any, ...]] = []

    async def call(
        self, function_path: str, args: Sequence[Any], *, deadline_seconds: float, cached: bool = False
    ) -> Any:
        self.calls.append((function_path, list(args), deadline_seconds, cached))
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


UNDECIDED = r"\boxed{\sin^2 x + \cos^2 x}"


async def test_only_what_exact_means_leave_undecided_goes_to_the_workers() -> None:
    workers = ScriptedWorkers(True)
    scorer = hub(rm_type="math", workers=workers, worker_timeout_seconds=2.0)
    assert (await scorer.grade(r"\boxed{2}", "1")).reward == 0.0
    assert workers.calls == []
    assert (await scorer.grade(UNDECIDED, ["2x", "1"])).reward == 1.0
    path = "rollfeed.rewards.equality.numeric.equals_any"
    assert workers.calls == [(path, [r"\sin^2 x + \cos^2 x", ["2x", "1"]], 2.0, True)]


async def test_worker_that_overruns_is_a_timeout_and_one_that_dies_an_error() -> None:
    for failure, outcome in [
        (WorkerTimeoutError("too slow"), Outcome.TIMEOUT),
        (WorkerDiedError("killed"), Outcome.ERROR),
        (RuntimeError("odd"), Outcome.ERROR),
    ]:
        verdict = await hub(rm_type="math", workers=ScriptedWorkers(failure)).grade(UNDECIDED, "1")
        assert (verdict.outcome, verdict.reward) == (outcome, None)
        assert str(failure) in verdict.detail


async def test_without_workers_this_process_makes_the_calls() -> None:
    assert (await hub(rm_type="math").grade(UNDECIDED, "1")).reward == 1.0


async def test_grader_that_raises_is_an_error() -> None:
    def broken(response: str, label: Any, metadata: Any) -> Verdict:
        raise KeyError("oops")

    verdict = await hub(graders={"broken": BuiltinGrader("broken", broken)}).grade("4", "4", rm_type="broken")
    assert verdict.outcome is Outcome.ERROR
    assert "KeyError" in verdict.detail


@pytest.mark.parametrize("ending", ["<|im_end|>", "<|endoftext|>", "</s>", "<|eot_id|>", ""])
async def test_the_token_that_ended_a_response_is_no_part_of_the_answer(ending: str) -> None:
    exact = hub(rm_type="exact")
    assert (await exact.grade(f"apple{ending}", "apple")).reward == 1.0
    assert (await exact.grade(f"<|im_end|>apple{ending} ", "apple")).reward == 0.0


async def test_a_function_grades_a_single_response_as_it_scores_a_rollout() -> None:
    def with_key(sample: Sample, prompt: Prompt) -> dict[str, float]:
        return {"length": len(sample.response), "label": float(prompt.label), "prompt": len(prompt.text)}

    scorer = hub(reward_fn=with_key, reward_key="length", rm_type="number")
    assert (await scorer.grade("abc", 7, prompt="?", metadata={"rm_type": "exact"})).reward == {
        "length": 3.0, "label": 7.0, "prompt": 1.0
    }  # fmt: skip
    assert (await scorer.grade("abc", 7, reward_key="label")).reward == 7.0
    assert (await scorer.grade(None, 7)).outcome is Outcome.ERROR
    chosen = hub(named_reward_fns={"one": lambda sample, prompt: 1.0}, rm_type="number")
    assert (await chosen.grade("2", "3", metadata={"reward_fn": "one"})).reward == 1.0
    assert (await chosen.grade("2", "3")).reward == 0.0
    assert "did you mean one?" in (await chosen.grade("2", "3", metadata={"reward_fn": "on"})).detail
