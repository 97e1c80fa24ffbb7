"""Sources learn from every scored group, once, and what they have learned is committed with their position."""

from collections import Counter
from collections.abc import Sequence

import pytest

from rollfeed.errors import RunFailedError
from rollfeed.prompts import AdaptiveDatasetSource, LoadedPrompts
from rollfeed.protocols import Scorer
from rollfeed.testing import Fault, ListSource, ScriptedEngine, make_prompt
from rollfeed.types import Drop, Group, Keep, Prompt, Rollout, StepCommit, Verdict


class Learning(ListSource):
    """Remembers of which groups it was told, in order."""

    def __init__(self) -> None:
        super().__init__([f"prompt {number}" for number in range(10)], repeat=True)
        self.told: list[int] = []

    def learn(self, group: Group) -> None:
        assert group.is_finished
        self.told.append(group.group_index)

    def state_dict(self):
        return {**super().state_dict(), "told": list(self.told)}

    def load_state_dict(self, state) -> None:
        super().load_state_dict(state)
        self.told = list(state["told"])


def drop_thirds(samples):
    return Drop("third") if samples[0].group_index % 3 == 2 else Keep()


@pytest.mark.parametrize("deterministic", [False, True])
async def test_a_source_is_told_of_what_filters_drop_too_and_not_of_what_failed(make_rollouts, deterministic) -> None:
    source, commits = Learning(), []
    engine = ScriptedEngine(
        random_order=4, fault_of=lambda request: Fault.RAISE if request.request_id == "step0-rollout2" else None
    )
    async with make_rollouts(
        engine, source=source, group_filter=drop_thirds, commit=commits.append, deterministic=deterministic
    ) as rollouts:
        batch = await rollouts.generate_batch()
    ended = [group.group_index for group in batch.groups] + [
        dropped.group.group_index for dropped in commits[0].dropped if dropped.reason != "failed"
    ]
    assert source.told == sorted(ended + [group.group_index for group in commits[0].state.surplus])
    assert 2 in source.told
    assert 1 not in source.told
    assert commits[0].state.source["told"] == source.told


@pytest.mark.parametrize("mode", ["sync", "partial"])
async def test_a_source_is_told_once_of_a_group_whatever_becomes_of_it(make_rollouts, mode) -> None:
    source, commits = Learning(), []
    async with make_rollouts(
        ScriptedEngine(random_order=2),
        source=source,
        mode=mode,
        max_staleness=None,
        over_sampling_batch_size=7,
        commit=commits.append,
    ) as rollouts:
        for step in range(6):
            await rollouts.generate_batch()
            await rollouts.update_weights({}, policy_version=2 * step)
    assert set(Counter(source.told).values()) == {1}
    trained = {group.group_index for commit in commits for group in commit.batch.groups}
    assert trained <= set(source.told)


async def test_what_was_not_committed_is_not_known_after_a_kill(make_rollouts) -> None:
    commits: list[StepCommit] = []
    async with make_rollouts(ScriptedEngine(), source=Learning(), commit=commits.append) as rollouts:
        for _ in range(2):
            await rollouts.generate_batch()
    again = Learning()
    async with make_rollouts(ScriptedEngine(), source=again, state=commits[0].state, commit=commits.append) as rollouts:
        assert again.told == [0, 1, 2, 3]
        await rollouts.generate_batch()
    assert again.told == list(range(8))


async def test_a_source_hears_of_the_end_of_a_step_after_its_groups_and_before_its_state_is_taken(
    make_rollouts,
) -> None:
    class Counting(Learning):
        def end_step(self) -> None:
            self.told.append(-1)

    commits: list[StepCommit] = []
    async with make_rollouts(ScriptedEngine(), source=Counting(), commit=commits.append) as rollouts:
        for _ in range(2):
            await rollouts.generate_batch()
    assert [commit.state.source["told"] for commit in commits] == [
        [0, 1, 2, 3, -1],
        [0, 1, 2, 3, -1, 4, 5, 6, 7, -1],
    ]


async def test_a_source_that_fails_to_learn_ends_the_run_with_its_name(make_rollouts) -> None:
    class Broken(ListSource):
        def learn(self, group: Group) -> None:
            raise ZeroDivisionError("nothing learned")

    async with make_rollouts(ScriptedEngine(), source=Broken(["a"], repeat=True)) as rollouts:
        with pytest.raises(RunFailedError, match=r"plugins.prompt_source .*learn.*nothing learned"):
            await rollouts.generate_batch()


class JudgingScorer(Scorer):
    """Has rows of three kinds: never, sometimes and always solved."""

    async def score(self, rollouts: Sequence[Rollout], prompt: Prompt) -> list[Verdict]:
        kind = int(prompt.prompt_id.split("/")[1].split("@")[0]) % 3
        return [Verdict.graded(kind == 2 or (kind == 1 and each.rollout_id % 2 == 0)) for each in rollouts]


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_after_a_kill_an_adaptive_data_set_goes_on_as_it_would_have(make_rollouts, mode) -> None:
    prompts = [make_prompt(f"{number} =", prompt_id=f"rows/{number}", source="rows") for number in range(30)]

    def make_source() -> AdaptiveDatasetSource:
        loaded = LoadedPrompts(name="rows", prompts=prompts)
        return AdaptiveDatasetSource(loaded, group_size=2, seed=0, rollout_shuffle=True)

    async def run(steps: range, state=None) -> list[StepCommit]:
        commits: list[StepCommit] = []
        async with make_rollouts(
            ScriptedEngine(random_order=3),
            source=make_source(),
            mode=mode,
            scorer=JudgingScorer(),
            state=state,
            commit=commits.append,
        ) as rollouts:
            for step in steps:
                await rollouts.generate_batch()
                await rollouts.update_weights({}, policy_version=step + 1)
        return commits

    whole = await run(range(24))
    metrics = whole[-1].batch.metrics
    assert metrics["datasets/rows/num_passed_over"] > 20
    assert metrics["datasets/rows/num_known"] == 30
    for killed_after in (0, 7, 20):
        state = whole[killed_after].state
        source = make_source()
        source.load_state_dict(state.source)
        assert source.state_dict() == state.source
        again = await run(range(killed_after + 1, killed_after + 3), state)
        before, after = (
            {group.group_index: group.prompt.prompt_id for commit in commits[:2] for group in commit.batch.groups}
            for commits in (whole[killed_after + 1 :], again)
        )
        same = before.keys() & after.keys()
        assert len(same) > 3
        assert {index: before[index] for index in same} == {index: after[index] for index in same}
