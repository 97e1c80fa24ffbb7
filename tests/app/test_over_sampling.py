"""What a batch filter leaves out is waste: it is dropped, and no later batch is made of it."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollfeed import app
from rollfeed.config import RolloutConfig, validate_settings
from rollfeed.errors import ConfigError, RunFailedError
from rollfeed.filters import build_batch_filter
from rollfeed.store import RunDirectory, RunReader
from rollfeed.testing import CharTokenizer, ListSource, ScriptedEngine
from rollfeed.types import Drop, FilterDecision, Group, Keep, Prompt, Sample, StepCommit

WIDEST = build_batch_filter("reward_std", {}, reward_key=None)
MODES = ["sync", "partial", "async"]


async def digit_or_nothing(sample: Sample, prompt: Prompt) -> float:
    """Half of the groups have no spread."""
    del prompt
    return float(sample.response) if sample.group_index % 2 else 1.0


def prompts(count: int = 100_000) -> ListSource:
    return ListSource([f"prompt {number}" for number in range(count)])


async def make_steps(
    num_steps: int,
    *,
    order: int = 1,
    update: bool = False,
    out: Path | None = None,
    source: ListSource | None = None,
    num_extra: int | None = None,
    **settings: Any,
) -> list[StepCommit]:
    """Make steps of 8 drawn and 4 kept; where there is a directory, go on in it."""
    own = {name: settings.pop(name) for name in ("batch_filter", "group_filters") if name in settings}
    config = RolloutConfig(
        rollout={"rollout_batch_size": 4, "over_sampling_batch_size": 8, "n_samples_per_prompt": 2, **settings},
        filters={"over_sampling": None if num_extra is None else {"num_extra": num_extra}},
        plugins={"reward": digit_or_nothing, "batch_filter": WIDEST, **own},
    )
    commits: list[StepCommit] = []
    directory = None if out is None else RunDirectory.open(out, settings={}, identity={}, overwrite=False)

    def commit(step: StepCommit) -> None:
        commits.append(step)
        if directory is not None:
            directory.commit(step, reward_key=None)

    rollouts = app.open_rollouts(
        config,
        source=source or prompts(),
        engine=ScriptedEngine(random_order=order),
        tokenizer=CharTokenizer(),
        state=None if directory is None else directory.state,
        commit=commit,
    )
    try:
        async with rollouts:
            for _ in range(num_steps):
                batch = await rollouts.generate_batch()
                if update:
                    await rollouts.update_weights({}, policy_version=batch.step + 1)
                assert rollouts.ledger.balanced
    finally:
        if directory is not None:
            directory.close()
    return commits


def spread(group: Group) -> float:
    return float(group.reward_values().std())


def left_out(commit: StepCommit) -> list[Group]:
    return [dropped.group for dropped in commit.dropped if dropped.reason == "over_sampled"]


async def test_each_batch_is_the_widest_of_its_own_groups_as_the_run_directory_has_them(tmp_path: Path) -> None:
    sizes = {"rollout_batch_size": 32, "over_sampling_batch_size": 48}
    for _ in range(2):
        await make_steps(15, out=tmp_path / "run", **sizes)
    seen: set[int] = set()
    with RunReader(tmp_path / "run") as run:
        for step in range(30):
            batch, dropped = run.batch(step), run.dropped(step)
            assert {each.reason for each in dropped} == {"over_sampled"}
            own = sorted([*batch.groups, *(each.group for each in dropped)], key=lambda group: group.group_index)
            indices = {group.group_index for group in own}
            assert len(own) == len(indices) == 48
            assert not indices & seen
            seen |= indices
            widest = sorted(own, key=lambda group: -spread(group))[:32]
            assert sorted(group.group_index for group in widest) == [group.group_index for group in batch.groups]
            assert sum(spread(group) == 0.0 for group in own) >= 24
        assert run.ledger().dropped == 30 * 16
        assert run.ledger().drawn == 30 * 48


@pytest.mark.parametrize("update", [False, True])
@pytest.mark.parametrize("mode", MODES)
async def test_no_group_that_was_left_out_is_ever_trained_on(mode: str, update: bool) -> None:
    commits = await make_steps(20, mode=mode, update=update)
    gone: set[int] = set()
    for commit in commits:
        batch = {group.group_index for group in commit.batch.groups}
        assert len(batch) == 4
        assert not batch & gone
        losers = left_out(commit)
        assert len(losers) == 4
        assert min(map(spread, commit.batch.groups)) >= max(map(spread, losers))
        gone |= batch | {group.group_index for group in losers}
        waiting = [draw.group_index for draw in (*commit.state.requeued, *commit.state.in_flight)]
        assert not gone & {*waiting, *(group.group_index for group in commit.state.surplus)}


@pytest.mark.parametrize("mode", MODES)
async def test_half_of_the_groups_without_spread_fill_no_batch(mode: str) -> None:
    for commit in await make_steps(20, mode=mode):
        num_wide = [sum(spread(group) > 0.0 for group in each) for each in (commit.batch.groups, left_out(commit))]
        assert num_wide[0] == min(4, sum(num_wide))


async def test_what_was_left_out_is_counted_as_over_sampled() -> None:
    (commit,) = await make_steps(1)
    assert commit.state.ledger.dropped == 4
    assert commit.state.ledger.surplus == commit.state.ledger.discarded == 0
    tokens = sum(group.response_tokens for group in left_out(commit))
    assert commit.wasted_tokens == {"over_sampled": tokens}
    metrics = commit.batch.metrics
    assert metrics["rollout/groups_over_sampled"] == metrics["rollout/groups_dropped"] == 4
    assert metrics["rollout/wasted_tokens/over_sampled"] == tokens > 0
    assert not [name for name in metrics if name.startswith("rollout/dynamic_filter/")]


async def test_deterministic_choices_do_not_depend_on_completion_order() -> None:
    outcomes = []
    for order in range(3):
        commits = await make_steps(4, order=order, deterministic=True)
        outcomes.append([[group.group_index for group in commit.batch.groups] for commit in commits])
        outcomes[-1] += [[group.group_index for group in left_out(commit)] for commit in commits]
    assert outcomes[0] == outcomes[1] == outcomes[2]


async def test_without_a_batch_filter_surplus_is_kept() -> None:
    commits = await make_steps(6, batch_filter=None)
    assert sum(len(commit.state.surplus) for commit in commits) > 0
    assert not any(commit.dropped for commit in commits)


def drop_every_third(samples: list[Sample]) -> FilterDecision:
    return Drop("third") if samples[0].group_index % 3 == 0 else Keep()


@pytest.mark.parametrize("mode", MODES)
async def test_a_batch_is_chosen_among_as_many_groups_when_a_group_filter_drops_some(mode: str) -> None:
    for commit in await make_steps(10, mode=mode, group_filters=(drop_every_third,)):
        assert len(left_out(commit)) == 4


@pytest.mark.parametrize("mode", MODES)
async def test_the_number_of_extra_groups_can_be_set_without_over_sampling(mode: str) -> None:
    settings = {"over_sampling_batch_size": None, "num_extra": 3, "mode": mode}
    for commit in await make_steps(10, **settings):
        assert len(left_out(commit)) == 3


async def test_asynchronous_batches_without_staleness_are_chosen_among_more_groups_too() -> None:
    for commit in await make_steps(10, mode="async", max_staleness=0, update=True):
        assert len(left_out(commit)) == 4
        assert commit.batch.metrics["rollout/staleness_max"] == 0


async def test_a_source_that_ends_leaves_a_choice_among_what_there_is() -> None:
    commits = await make_steps(2, source=prompts(14))
    assert [len(left_out(commit)) for commit in commits] == [4, 2]


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ([0, 1, 2], "returned 3 of 8 groups, and a batch has 4: return at least as many, best first"),
        ([0, 1, 1, 2], "returned .* for 8 groups; it must return indices of groups, each at most once"),
        ([0, 1, 2, 8], "returned .* for 8 groups"),
        (None, "returned None; it must return a sequence of indices"),
    ],
)
async def test_a_batch_filter_that_makes_no_batch_ends_the_run_and_is_named(returned: Any, said: str) -> None:
    def choose_badly(groups: list[Group]) -> Any:
        del groups
        return returned

    with pytest.raises(RunFailedError, match=rf"choose_badly\) {said}"):
        await make_steps(1, batch_filter=choose_badly)


FEW = {"prompts": {"environments": [{"id": "core/copy_text"}]}, "rollout": {"rollout_batch_size": 2}}


def functions_of(tmp_path: Path, **sections: Any) -> app.Functions:
    (tmp_path / "own_pick.py").write_text("def newest(groups):\n    return list(range(len(groups)))[::-1]\n")
    return app.load_functions(validate_settings({**FEW, **sections}, where="test"), folders=[tmp_path])


def test_a_batch_filter_of_ones_own_is_named_in_the_settings(tmp_path: Path) -> None:
    plugins = {"batch_filter": "own_pick:newest"}
    over_sampled = {"rollout_batch_size": 2, "over_sampling_batch_size": 4}
    rollout = functions_of(tmp_path, plugins=plugins, rollout=over_sampled).rollout
    assert rollout.over_sampling.batch_filter([1, 2, 3]) == [2, 1, 0]
    assert rollout.over_sampling.num_extra == 2
    rollout = functions_of(tmp_path, plugins=plugins, filters={"over_sampling": {"num_extra": 5}}).rollout
    assert rollout.over_sampling.num_extra == 5


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {
                "plugins": {"batch_filter": "own_pick:newest"},
                "filters": {"over_sampling": {"name": "reward_std"}},
            },
            "plugins.batch_filter replaces filters.over_sampling",
        ),
        (
            {"plugins": {"batch_filter": "own_pick:newest"}, "filters": {"over_sampling": {"tolerance": 1}}},
            "leave only num_extra there",
        ),
        ({"filters": {"over_sampling": {"num_extra": 3}}}, "has no filter: set its name, or plugins.batch_filter"),
        (
            {
                "plugins": {"batch_filter": "own_pick:oldest"},
                "rollout": {"rollout_batch_size": 2, "over_sampling_batch_size": 4},
            },
            r"plugins.batch_filter = 'own_pick:oldest': own_pick has no 'oldest'",
        ),
    ],
)
def test_batch_filters_that_contradict_each_other_are_refused(tmp_path: Path, sections: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        functions_of(tmp_path, **sections)


def test_a_batch_filter_with_nothing_to_choose_from_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to choose from"):
        RolloutConfig(rollout={"rollout_batch_size": 4}, plugins={"batch_filter": partial(WIDEST)})
