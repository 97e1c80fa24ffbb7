"""Sources learn from every scored group, once, and what they have learned is committed with their position."""

from collections import Counter

import pytest

from rollfeed.errors import RunFailedError
from rollfeed.testing import Fault, ListSource, ScriptedEngine
from rollfeed.types import Drop, Group, Keep, StepCommit


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
