"""A step: how it is called, the order of its groups, what it returns, and who sees the groups that were left out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollfeed.compat.slime_plugins.names.forms import RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn
from rollfeed.testing import ScriptedEngine

WriteText = Callable[[str], Path]


def digit(sample: Any, prompt: Any) -> float:
    return float(int(sample.response[0]) > 4)


def one(sample: Any, prompt: Any) -> float:
    return 1.0


async def test_a_rollout_function_is_told_the_step_and_that_it_is_no_evaluation(
    write_plugins: WriteText, make_batches: Callable[..., Any]
) -> None:
    text = (
        "from slime.rollout.sglang_rollout import generate_rollout\n"
        "def f(args, rollout_id, data_source, evaluation=True):\n"
        "    assert evaluation is False and args.rollout_batch_size == 3 and args.rollout_global_dataset\n"
        "    data_source.update_metadata({'step': rollout_id})\n"
        "    assert data_source.get_metadata() == {'step': rollout_id}\n"
        "    output = generate_rollout(args, rollout_id, data_source, evaluation)\n"
        "    assert all(sample.reward is not None for group in output.samples for sample in group)\n"
        "    output.metrics = {'mine': 1.0}\n"
        "    return output\n"
    )
    batches = await make_batches(2, folder=write_plugins(text), rollout_fn="slime:mine.f", reward_fn=one)
    assert [batch.step for batch in batches] == [0, 1]
    assert not any("mine" in batch.metrics for batch in batches)  # metrics of the output are not kept


@pytest.mark.parametrize(
    "returned", ["RolloutFnTrainOutput(samples=groups)", "groups", "(groups, [])", "(RolloutFnTrainOutput(groups), [])"]
)
async def test_newer_and_older_forms_of_what_is_returned_are_read(
    write_plugins: WriteText, make_batches: Callable[..., Any], returned: str
) -> None:
    text = (
        "from slime.rollout.base_types import RolloutFnTrainOutput\n"
        "from slime.rollout.sglang_rollout import generate_rollout\n"
        "def f(args, rollout_id, data_source):\n"
        "    groups = generate_rollout(args, rollout_id, data_source).samples\n"
        f"    return {returned}\n"
    )
    (batch,) = await make_batches(1, folder=write_plugins(text), rollout_fn="slime:mine.f", reward_fn=one)
    assert len(batch.groups) == 3


def test_what_older_functions_return_is_put_into_the_newer_form() -> None:
    def older(*args: Any, evaluation: bool) -> Any:
        return {"set": {}} if evaluation else [[1]]

    assert call_rollout_fn(older, 1, 2, 3, evaluation=False) == RolloutFnTrainOutput(samples=[[1]])
    assert call_rollout_fn(older, 1, 2, 3, evaluation=True) == RolloutFnEvalOutput(data={"set": {}})
    newer = RolloutFnTrainOutput(samples=[], metrics={"a": 1})
    assert call_rollout_fn(lambda *args, evaluation: newer, evaluation=False) is newer


async def test_groups_are_in_the_order_of_their_prompts_whichever_finished_first(
    make_batches: Callable[..., Any],
) -> None:
    batches = await make_batches(
        3, engine=ScriptedEngine(random_order=3), reward_fn=one, rollout={"over_sampling_batch_size": 6}
    )
    for batch in batches:
        indices = [sample.index for sample in batch.samples]
        assert indices == sorted(indices)
        assert all(len(group.rollouts) == 4 for group in batch.groups)


async def test_finished_groups_beyond_the_batch_are_kept_for_the_next_step(make_batches: Callable[..., Any]) -> None:
    """Not as in slime, which drops them."""
    engine = ScriptedEngine(random_order=1)
    batches = await make_batches(
        4, engine=engine, reward_fn=one, rollout={"over_sampling_batch_size": 6, "max_staleness": 8}
    )
    asked = {request.request_id.rpartition("rollout")[2] for request in engine.requests}
    assert len({group.group_index for batch in batches for group in batch.groups}) == 12
    assert sum(batch.metrics["rollout/groups_dropped"] for batch in batches) == 0
    assert len(asked) <= 4 * (12 + 6)


async def test_the_function_for_all_samples_sees_kept_and_dropped_groups_and_the_data_source(
    write_plugins: WriteText, make_batches: Callable[..., Any], open_source: Callable[..., Any]
) -> None:
    text = (
        "from slime.utils.types import Sample\n"
        "class Source:\n"
        "    def __init__(self, args): self.args, self.count, self.seen, self.asked = args, 0, [], []\n"
        "    def get_samples(self, num_samples):\n"
        "        self.asked.append(num_samples)\n"
        "        self.count += num_samples\n"
        "        return [[Sample(prompt=f'p{self.count - n}') for _ in range(self.args.n_samples_per_prompt)]\n"
        "                for n in range(num_samples)]\n"
        "def process(args, all_samples, data_source):\n"
        "    for group in all_samples:\n"
        "        data_source.seen.append((group[0].group_index, len({s.reward for s in group}) > 1))\n"
        "def keep(args, samples): return len({s.reward for s in samples}) > 1\n"
    )
    folder = write_plugins(text)
    own = {"prompt_source": "slime:mine.Source", "slime_args": {"rollout_all_samples_process_path": "mine.process"}}
    source = open_source(folder, **own)
    batches = await make_batches(
        3, folder=folder, source=source, reward_fn=digit, group_filters=["slime:mine.keep"], **own
    )
    kept = {group.group_index for batch in batches for group in batch.groups}
    seen = dict(source._source.seen)
    assert kept < seen.keys()
    assert {index for index, differs in seen.items() if differs} >= kept
    assert len(source._source.seen) == len(seen)
    assert max(source._source.asked) > 1  # as many as are needed, at once
