from __future__ import annotations

import asyncio
import gc
import os
import resource
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollfeed.app import open_rollouts
from rollfeed.app.rewards import RewardServices
from rollfeed.app.scoring.reward_functions import load_reward_function
from rollfeed.config import RewardSettings, RolloutConfig
from rollfeed.errors import ConfigError
from rollfeed.protocols import BatchedRewardFn, GroupRewardFn, Isolation, RewardFn
from rollfeed.rewards.by_name import Takes
from rollfeed.rewards.hub import RewardHub
from rollfeed.rewards.rows import row_rollout
from rollfeed.testing import CharTokenizer, ListSource, ScriptedEngine, make_group, make_prompt
from rollfeed.types import Correct, Outcome, Prompt, Rollout, Sample, SampleStatus, Verdict

HANGING = 30
"""Rollout whose grading never ends, where a test has one."""
PROGRAM = "```python\nprint(int(input()) + 1)\n```"
TESTS = {"inputs": ["1", "2"], "outputs": ["2", "3"]}


def hub(services: RewardServices, **settings: Any) -> RewardHub:
    defaults: dict[str, Any] = {"graders": services.graders(), "timeout_seconds": 30.0, "workers": services.workers}
    return RewardHub(**{**defaults, **settings})


def rollouts_of(count: int) -> list[Rollout]:
    rollouts = make_group([0.0] * count).rollouts
    return [
        replace(rollout, verdict=None, samples=tuple(replace(sample, reward=None) for sample in rollout.samples))
        for rollout in rollouts
    ]


@pytest.fixture
def load(folders: list[Path], services: RewardServices) -> Callable[..., Any]:
    """Return the function that loads a reward function of these tests, to be called in workers."""

    def load(name: str, protocol: type[Any] = RewardFn, takes: Takes = Takes.SAMPLE, seconds: float = 30.0) -> Any:
        return load_reward_function(
            f"reward_functions:{name}",
            protocol,
            takes,
            "plugins.reward",
            settings=RewardSettings(timeout_seconds=seconds),
            workers=services.workers,
            folders=folders,
            label_names=["answer"],
        )

    return load


# The run's services


async def test_nothing_starts_before_it_is_needed(services: RewardServices) -> None:
    verdict = await hub(services).grade(r"\boxed{4}", "4", rm_type="math")
    assert verdict.reward == 1.0
    assert services.workers.counts.calls == 0


async def test_what_exact_means_do_not_decide_goes_to_the_workers(services: RewardServices) -> None:
    verdict = await hub(services).grade(r"\boxed{\sqrt{5+2\sqrt{6}}}", r"\sqrt2+\sqrt3", rm_type="math")
    assert verdict.reward == 1.0
    assert services.workers.counts.calls == 1


async def test_isolation_of_programs_is_told_once_and_boxed_types_work(
    make_services: Callable[..., RewardServices],
) -> None:
    told: list[Isolation] = []
    async with make_services(told.append) as services:
        scorer = hub(services, timeout_seconds=0.001)
        for _ in range(2):
            assert (await scorer.grade(PROGRAM, TESTS, rm_type="livecodebench")).reward == 1.0
        assert (await scorer.grade(PROGRAM, TESTS, rm_type="boxed_livecodebench")).reward == 0.0
    assert told == [services.sandboxes.isolation]


async def test_services_that_are_left_grade_no_more(make_services: Callable[..., RewardServices]) -> None:
    async with make_services(num_workers=1) as services:
        pass
    verdict = await hub(services).grade(r"\boxed{\sqrt{5+2\sqrt{6}}}", r"\sqrt2+\sqrt3", rm_type="math")
    assert (verdict.outcome, verdict.reward) == (Outcome.ERROR, None)


@pytest.mark.parametrize("num_gradings", [2_000, pytest.param(10_000, marks=pytest.mark.soak)])
async def test_gradings_leave_processes_descriptors_and_memory_as_they_were(
    leaves_no_process: None, make_services: Callable[..., RewardServices], num_gradings: int
) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    memory: list[int] = []
    async with make_services(num_workers=2) as services:
        scorer = hub(services)

        async def grade(number: int) -> Verdict:
            if number % 4:
                return await scorer.grade(rf"\boxed{{{number}.0}}", str(number), rm_type="math")
            answer, label = rf"\sqrt{{5+2\sqrt{{6}}}}+{number}", rf"\sqrt2+\sqrt3+{number}"
            return await scorer.grade(rf"\boxed{{{answer}}}", label, rm_type="math")

        for round_number in range(5):
            numbers = range(round_number * num_gradings // 5, (round_number + 1) * num_gradings // 5)
            verdicts = await asyncio.gather(*map(grade, numbers))
            assert {verdict.reward for verdict in verdicts} == {1.0}
            del verdicts
            gc.collect()
            memory.append(resident_bytes())
        assert services.workers.counts.calls == num_gradings // 4
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert memory[-1] <= 1.05 * memory[1]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_every_grader_is_documented(make_services: Callable[..., RewardServices]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
    for rm_type in make_services().graders():
        assert f"| `{rm_type}` |" in page


# Functions of users, in workers


@pytest.mark.parametrize(
    ("label", "reward"),
    [("length", 1.0), ("numpy", 0.5), ("dictionary", {"score": 1.0, "style": 0.5}), ("verdict", 1.0)],
)
async def test_function_in_a_worker_gives_its_reward(
    load: Callable[..., Any], services: Any, label: str, reward: Any
) -> None:
    scorer = hub(services, reward_fn=load("score"), reward_key="score")
    (verdict,) = await scorer.score(rollouts_of(1), make_prompt(label=label))
    assert (verdict.outcome, verdict.reward) == (Outcome.OK, reward)
    if label == "verdict":
        assert verdict.correct is Correct.YES


@pytest.mark.parametrize(
    ("label", "detail"),
    [
        ("failed", "judge is ill"),
        ("nan", "must be finite"),
        ("infinite", "must be finite"),
        ("none", "must be a number"),
        ("text", "must be a number"),
        ("object", "must be a number"),
        ("raise", "ZeroDivisionError: by zero"),
        ("exit", "SystemExit: 1"),
        ("die", "SIGKILL"),
    ],
)
async def test_function_that_gives_no_number_is_an_error_with_the_cause(
    load: Callable[..., Any], services: Any, label: str, detail: str
) -> None:
    (verdict,) = await hub(services, reward_fn=load("score")).score(rollouts_of(1), make_prompt(label=label))
    assert (verdict.outcome, verdict.reward) == (Outcome.ERROR, None)
    assert detail in verdict.detail


@pytest.mark.parametrize("label", ["spin", "sleep", "lock"])
async def test_function_that_never_returns_is_killed(load: Callable[..., Any], services: Any, label: str) -> None:
    scorer = hub(services, reward_fn=load("score", seconds=1.0))
    (verdict,) = await scorer.score(rollouts_of(1), make_prompt(label=label))
    assert (verdict.outcome, verdict.reward) == (Outcome.TIMEOUT, None)
    assert "1 s" in verdict.detail


async def test_group_and_batched_functions_run_in_workers(load: Callable[..., Any], services: Any) -> None:
    group = hub(services, group_reward_fn=load("rank", GroupRewardFn, Takes.GROUP))
    assert [v.reward for v in await group.score(rollouts_of(3), make_prompt())] == [0.0, 1.0, 2.0]
    batched = hub(services, batched_reward_fn=load("rank_batch", BatchedRewardFn, Takes.SAMPLES), reward_key="score")
    assert [v.reward for v in await batched.score(rollouts_of(2), make_prompt())] == [{"score": 0.0}, {"score": 1.0}]
    wrong = hub(services, group_reward_fn=load("too_few", GroupRewardFn, Takes.GROUP))
    verdicts = await wrong.score(rollouts_of(3), make_prompt())
    assert {verdict.outcome for verdict in verdicts} == {Outcome.ERROR}
    assert "2 results for 3 rollouts" in verdicts[0].detail


async def test_sample_and_prompt_arrive_in_the_worker_as_they_are(load: Callable[..., Any], services: Any) -> None:
    rollouts = rollouts_of(1)
    sample = rollouts[0].samples[0]
    prompt = replace(make_prompt(), messages=({"role": "user", "content": "?"},), metadata={"weight": 3})
    (verdict,) = await hub(services, reward_fn=load("facts"), reward_key="tokens").score(rollouts, prompt)
    assert isinstance(verdict.reward, dict)
    assert verdict.reward.pop("process") != os.getpid()
    assert verdict.reward == {
        "tokens": float(sample.token_ids.sum()),
        "mask": float(sample.loss_mask.sum()),
        "prompt_tokens": float(prompt.token_ids.sum()),
        "messages": 1.0,
        "metadata": 3.0,
    }


async def test_functions_that_are_called_by_name_run_in_workers(load: Callable[..., Any], services: Any) -> None:
    prompt = make_prompt(label="4", metadata={"kind": "sum"})
    rollouts = [row_rollout(text, "4", {"kind": "sum"}) for text in ("4", "five")]
    (first, second) = await hub(services, reward_fn=load("by_response")).score(rollouts, prompt)
    assert (first.reward, second.reward) == (1.5, 4.5)
    (missing, _) = await hub(services, reward_fn=load("by_column")).score(rollouts, prompt)
    assert "it asks for 'missing', which this row has not" in missing.detail
    for name, takes in (("as_in_trl", Takes.SAMPLE), ("as_in_trl_later", Takes.SAMPLE)):
        verdicts = await hub(services, reward_fn=load(name, takes=takes)).score(rollouts, prompt)
        assert [each.reward for each in verdicts] == ([1.0, 0.0] if name == "as_in_trl" else [2.0, 2.0])
    batched = hub(services, batched_reward_fn=load("as_in_trl", BatchedRewardFn, Takes.SAMPLES))
    assert [each.reward for each in await batched.score(rollouts, prompt)] == [1.0, 0.0]
    group = hub(services, group_reward_fn=load("as_in_trl_later", GroupRewardFn, Takes.GROUP))
    assert [each.reward for each in await group.score(rollouts, prompt)] == [4.0, 4.0]


async def test_async_functions_stay_in_this_process(load: Callable[..., Any], services: Any) -> None:
    (verdict,) = await hub(services, reward_fn=load("asynchronous")).score(rollouts_of(1), make_prompt())
    assert verdict.reward == float(os.getpid())


# Whole runs


def texts_as_prompts(count: int) -> ListSource:
    return ListSource([f"prompt {number}" for number in range(count)], repeat=True)


@pytest.mark.parametrize("hanging", ["sleep_on_one", "spin_on_one"])
async def test_r35_reward_stall_costs_its_own_deadline(
    services: RewardServices, load: Callable[..., Any], pass_seconds: Callable[[float], None], hanging: str
) -> None:
    """R35: of 64 gradings one never ends; all others have their rewards, and it is killed."""
    scorer = hub(services, reward_fn=load(hanging, seconds=300.0))
    (rollout,) = rollouts_of(1)
    numbered = [
        replace(rollout, rollout_id=number, samples=(replace(rollout.samples[0], rollout_id=number),))
        for number in range(HANGING - 30, HANGING + 34)
    ]
    gradings = [asyncio.create_task(scorer.score([rollout], make_prompt())) for rollout in numbered]
    await asyncio.wait([*gradings[:30], *gradings[31:]])
    assert not gradings[30].done()
    assert services.workers.num_running == 1
    pass_seconds(300.0)
    verdicts = [verdict for grading in gradings for verdict in await grading]
    assert [verdict.reward for verdict in verdicts] == [
        None if rollout.rollout_id == HANGING else float(rollout.rollout_id) for rollout in numbered
    ]
    assert verdicts[30].outcome is Outcome.TIMEOUT
    assert services.workers.counts.timeouts == 1


async def test_r35_reward_stall_stops_no_run(leaves_no_process: None, folders: list[Path]) -> None:
    """R35: it is counted apart from wrong answers, its group is replaced, and no process is left."""
    config = RolloutConfig(
        rollout={"rollout_batch_size": 16, "n_samples_per_prompt": 4},
        reward={"timeout_seconds": 4.0, "workers": {"num_workers": 2}},
        plugins={"reward": "reward_functions:sleep_on_one"},
    )
    rollouts = open_rollouts(
        config, source=texts_as_prompts(20), engine=ScriptedEngine(), folders=folders, tokenizer=CharTokenizer()
    )
    async with rollouts:
        batch = await rollouts.generate_batch()
    assert batch.metrics["rollout/reward_timeout"] == 1
    assert batch.metrics["rollout/reward_error"] == 0
    assert batch.metrics["rollout/groups_failed"] == 1
    assert [sample.reward for sample in batch.samples] == [float(sample.rollout_id) for sample in batch.samples]
    assert len(batch.samples) == 64
    assert HANGING not in [sample.rollout_id for sample in batch.samples]


VALUES = [(0.0, 0.0), ({"score": 1}, 1.0), (-1, -1.0), (0, 0.0), (True, 1.0), (None, None)]


@pytest.mark.parametrize(("reward", "value"), VALUES, ids=str)
@pytest.mark.parametrize("place", ["this process", "a worker"])
async def test_r36_reward_value_types(
    services: RewardServices, load: Callable[..., Any], place: str, reward: Any, value: float | None
) -> None:
    """R36: 0.0 is a value, reward_key picks from a dictionary, an int is a number, None means not scored."""
    function = load("given") if place == "a worker" else lambda sample, prompt: reward
    scorer = hub(services, reward_fn=function, reward_key="score")
    (rollout,) = rollouts_of(1)
    (verdict,) = await scorer.score([rollout], make_prompt(label=reward))
    assert services.workers.counts.calls == (place == "a worker")
    if value is None:
        assert (verdict.outcome, verdict.reward) == (Outcome.ERROR, None)
        return
    scored = rollout.with_reward(verdict)
    assert scored.samples[0].get_reward_value("score") == value
    assert await scorer.score([scored], make_prompt(label=reward)) == [verdict]


async def test_r37_group_reward_gets_each_group_once_and_whole() -> None:
    """R37: the group function is called once a group, with n samples of one prompt, all finished."""
    calls: list[tuple[str, list[int], set[SampleStatus]]] = []

    def reward(samples: Sequence[Sample], prompt: Prompt) -> list[float]:
        calls.append((prompt.text, [sample.group_index for sample in samples], {sample.status for sample in samples}))
        return [float(number) for number in range(len(samples))]

    config = RolloutConfig(
        rollout={"rollout_batch_size": 4, "n_samples_per_prompt": 3, "over_sampling_batch_size": 8},
        plugins={"group_reward": reward},
    )
    engine = ScriptedEngine()
    rollouts = open_rollouts(config, source=texts_as_prompts(50), engine=engine, tokenizer=CharTokenizer())
    async with rollouts:
        for _ in range(3):
            batch = await rollouts.generate_batch()
            assert [sample.reward for sample in batch.samples] == [0.0, 1.0, 2.0] * 4
    assert all(len(groups) == 3 and len(set(groups)) == 1 for _, groups, _ in calls)
    assert len({groups[0] for _, groups, _ in calls}) == len(calls)
    assert set().union(*(statuses for _, _, statuses in calls)) <= {SampleStatus.COMPLETED, SampleStatus.TRUNCATED}


async def test_r37_group_with_an_aborted_member_is_not_scored(services: RewardServices) -> None:
    """R37: neither is the function called, nor a reward made up."""

    def reward(samples: Any, prompt: Any) -> Any:
        raise AssertionError("called")

    rollouts = rollouts_of(3)
    aborted = replace(rollouts[1].samples[0], status=SampleStatus.ABORTED)
    rollouts[1] = replace(rollouts[1], samples=(aborted,))
    verdicts = await hub(services, group_reward_fn=reward).score(rollouts, make_prompt())
    assert {(verdict.outcome, verdict.reward) for verdict in verdicts} == {(Outcome.ERROR, None)}


async def test_r37_group_function_in_a_worker_gets_each_group_once_and_whole(
    leaves_no_process: None, folders: list[Path]
) -> None:
    """R37: as above, where a run calls it: its process counts the calls."""
    config = RolloutConfig(
        rollout={"rollout_batch_size": 4, "n_samples_per_prompt": 3},
        reward={"reward_key": "call", "workers": {"num_workers": 1}},
        plugins={"group_reward": "reward_functions:count_groups"},
    )
    rollouts = open_rollouts(
        config, source=texts_as_prompts(50), engine=ScriptedEngine(), folders=folders, tokenizer=CharTokenizer()
    )
    async with rollouts:
        batch = await rollouts.generate_batch()
    for group in batch.groups:
        rewards = [sample.reward for rollout in group.rollouts for sample in rollout.samples]
        assert len({reward["call"] for reward in rewards}) == 1
        assert {reward["samples"] for reward in rewards} == {3.0}
        assert [reward["place"] for reward in rewards] == [0.0, 1.0, 2.0]
    assert sorted({sample.reward["call"] for sample in batch.samples}) == [1.0, 2.0, 3.0, 4.0]


async def test_run_that_fails_leaves_no_worker(leaves_no_process: None, folders: list[Path]) -> None:
    config = RolloutConfig(
        rollout={"rollout_batch_size": 1, "n_samples_per_prompt": 1}, plugins={"reward": "reward_functions:score"}
    )
    rollouts = open_rollouts(
        config, source=texts_as_prompts(20), engine=ScriptedEngine(), folders=folders, tokenizer=CharTokenizer()
    )

    async def stop_after_a_step() -> None:
        async with rollouts:
            await rollouts.generate_batch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await stop_after_a_step()


async def test_random_rewards_are_those_of_the_seed_and_replay(leaves_no_process: None) -> None:
    async def rewards(seed: int) -> list[Any]:
        config = RolloutConfig(
            seed=seed, rollout={"rollout_batch_size": 16, "n_samples_per_prompt": 4}, reward={"rm_type": "random"}
        )
        source = texts_as_prompts(20)
        rollouts = open_rollouts(config, source=source, engine=ScriptedEngine(), tokenizer=CharTokenizer())
        async with rollouts:
            batch = await rollouts.generate_batch()
        return [sample.reward for sample in sorted(batch.samples, key=lambda sample: sample.index)]

    first = await rewards(1)
    assert set(first) == {0.0, 1.0}
    assert await rewards(1) == first
    assert await rewards(2) != first


async def test_named_functions_are_chosen_by_the_prompt_and_checked_beforehand() -> None:
    config = RolloutConfig(
        rollout={"rollout_batch_size": 1, "n_samples_per_prompt": 2},
        reward={"functions": {"one": lambda sample, prompt: 1.0}},
        plugins={"reward": lambda sample, prompt: -1.0},
    )

    class Naming(ListSource):
        async def draw(self, count: int) -> list[Prompt]:
            return [replace(prompt, metadata={"reward_fn": "one"}) for prompt in await super().draw(count)]

    rollouts = open_rollouts(config, source=Naming(["a", "b"]), engine=ScriptedEngine(), tokenizer=CharTokenizer())
    async with rollouts:
        assert [sample.reward for sample in (await rollouts.generate_batch()).samples] == [1.0, 1.0]
    with pytest.raises(ConfigError, match=r"reward\.functions\.one"):
        open_rollouts(
            RolloutConfig(reward={"functions": {"one": lambda one: 1.0}}),
            source=Naming(["a"]),
            engine=ScriptedEngine(),
            tokenizer=CharTokenizer(),
        )
