"""Functions that samples name for themselves, and the filter that changes samples of a batch."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import rollfeed
from rollfeed.compat.slime_plugins import with_slime_plugins
from rollfeed.compat.slime_plugins.names.rm_hub import graded
from rollfeed.compat.slime_plugins.names.slime_sample import SlimeSample
from rollfeed.errors import PluginError, RunFailedError
from rollfeed.rewards.hub import PROMPT_KEY, RewardHub
from rollfeed.testing import ScriptedEngine
from rollfeed.types import Verdict

WriteText = Callable[[str], Path]
STRICT = {"failure_minimum": 1, "failure_budget": 0.0}
"""Of ``[rollout]``: what a plug-in asserts ends the run."""
SOURCE = """
from slime.rollout.sglang_rollout import generate
from slime.utils.types import Sample
class Source:
    def __init__(self, args): self.args, self.count = args, 0
    def get_samples(self, num_samples): return [self.group() for _ in range(num_samples)]
    def group(self):
        self.count += 1
        group = [Sample(prompt=f"p{self.count}", label="5") for _ in range(self.args.n_samples_per_prompt)]
        for sample in group:
            if self.count % 3 == 1: sample.generate_function_path = "mine.short"
            if self.count % 3 == 2: sample.custom_rm_path = "mine.seven"
        return group
async def short(args, sample, sampling_params):
    assert sample.generate_function_path == "mine.short"
    return await generate(args, sample, {**sampling_params, "max_new_tokens": 1})
async def seven(args, sample):
    assert sample.custom_rm_path == "mine.seven"
    return 7.0
async def two(args, sample): return 2.0
"""


def told(batches: list[Any]) -> list[Any]:
    return [
        (s.token_ids.tolist(), s.logprobs.tolist(), s.reward, s.index, s.status)
        for batch in batches
        for s in batch.samples
    ]


@pytest.mark.parametrize("general", [{"reward_fn": "slime:mine.two"}, {"reward_fn": lambda sample, prompt: 2.0}])
async def test_samples_of_a_source_are_answered_and_scored_by_the_functions_that_they_name(
    write_plugins: WriteText, make_batches: Callable[..., Any], open_source: Callable[..., Any], general: Any
) -> None:
    folder = write_plugins(SOURCE)
    own = {"prompt_source": "slime:mine.Source"}
    engine = ScriptedEngine(answer=lambda request: "9" * 5)
    batches = await make_batches(
        2, folder=folder, engine=engine, source=open_source(folder, **own), **own, **general, rollout=STRICT
    )
    groups = [group for batch in batches for group in batch.groups]
    assert [{sample.response_length for sample in group.samples} for group in groups] == [{1}, {6}, {6}] * 2
    assert [{sample.reward for sample in group.samples} for group in groups] == [{2.0}, {7.0}, {2.0}] * 2


async def test_a_generate_function_may_name_what_scores_its_sample(
    write_plugins: WriteText, make_batches: Callable[..., Any]
) -> None:
    text = (
        "from slime.rollout.sglang_rollout import generate\n"
        "async def f(args, sample, sampling_params):\n"
        "    sample.custom_rm_path = 'mine.seven' if sample.index % 2 else None\n"
        "    return await generate(args, sample, sampling_params)\n"
        "def seven(args, sample): return 7.0\n"
    )
    (batch,) = await make_batches(
        1, folder=write_plugins(text), generate="slime:mine.f", reward_fn=lambda sample, prompt: 2.0
    )
    assert [sample.reward for sample in batch.samples] == [2.0, 7.0] * 6


async def test_a_function_that_cannot_be_found_ends_the_run_in_one_line(
    write_plugins: WriteText, make_batches: Callable[..., Any]
) -> None:
    text = (
        "from slime.rollout.sglang_rollout import generate\n"
        "async def f(args, sample, sampling_params):\n"
        "    sample.custom_rm_path = 'mine.none'\n"
        "    return await generate(args, sample, sampling_params)\n"
    )
    with pytest.raises(RunFailedError, match="mine has no 'none'") as caught:
        await make_batches(1, folder=write_plugins(text), generate="slime:mine.f", reward_fn=lambda s, p: 1.0)
    assert "\n" not in str(caught.value)


async def test_groups_whose_samples_name_different_functions_are_refused(
    write_plugins: WriteText, open_source: Callable[..., Any]
) -> None:
    text = SOURCE.replace("for sample in group:", "for sample in group[:1]:")
    source = open_source(write_plugins(text), prompt_source="slime:mine.Source")
    with pytest.raises(RunFailedError, match="different prompts, labels or functions"):
        await source.draw(1)


FILTER = """
from slime.rollout.sglang_rollout import generate_rollout
seen = []
def remove(args, data):
    assert args.rollout_sample_filter_path == "mine.remove"
    seen.append([group[0].group_index for group in data])
    for group in data:
        for sample in group:
            if sample.reward == 0.0:
                sample.remove_sample = True
    data[0][0].loss_mask = [0] * data[0][0].response_length
def step(args, rollout_id, data_source, evaluation=False):
    return generate_rollout(args, rollout_id, data_source)
"""


def digit(sample: Any, prompt: Any) -> float:
    return float(int(sample.response[0]) > 4)


@pytest.mark.parametrize(
    ("mode", "rollout"), [("sync", {}), ("async", {}), ("sync", {"rollout_fn": "slime:mine.step"})]
)
async def test_the_sample_filter_changes_the_samples_of_a_batch(
    write_plugins: WriteText, make_batches: Callable[..., Any], mode: str, rollout: Any
) -> None:
    folder = write_plugins(FILTER)
    settings = {"reward_fn": digit, "rollout": {"mode": mode}}
    path = {"slime_args": {"rollout_sample_filter_path": "mine.remove"}}
    theirs = await make_batches(2, folder=folder, **settings, **path, **rollout)
    for batch in theirs:
        assert not batch.samples[0].loss_mask.any()
        assert all(sample.remove_sample is (sample.reward == 0.0) for sample in batch.samples)
    if mode == "sync":
        plain = await make_batches(2, **settings)
        assert told(theirs) == told(plain)
        # Removed samples count in the statistics of their group.
        assert [b.advantages_S.tolist() for b in theirs] == [b.advantages_S.tolist() for b in plain]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def remove(args): return None\n", r"slime calls it with \(args, groups\)"),
        ("async def remove(args, data): return None\n", "is async, and slime calls it without await"),
        ("def remove(args, data): return args.my_share\n", "args.my_share has no counterpart"),
        ("x = 1\n", "mine has no 'remove'"),
    ],
)
def test_a_sample_filter_that_cannot_work_is_refused_when_the_run_is_set_up(
    write_plugins: WriteText, text: str, message: str
) -> None:
    plugins = rollfeed.PluginSettings(slime_args={"rollout_sample_filter_path": "mine.remove"})
    with pytest.raises(PluginError, match=message) as caught:
        with_slime_plugins(rollfeed.RolloutConfig(plugins=plugins), folders=[write_plugins(text)])
    assert "plugins.slime_args.rollout_sample_filter_path = " in str(caught.value)


async def test_a_sample_filter_that_breaks_a_sample_ends_the_run_with_its_name(
    write_plugins: WriteText, make_batches: Callable[..., Any]
) -> None:
    folder = write_plugins("def remove(args, data):\n    data[0][0].response_length += 99\n")
    with pytest.raises(RunFailedError, match=r"mine:remove.*response_length = \d+ and \d+ tokens.*mine.py:1"):
        await make_batches(1, folder=folder, reward_fn=digit, slime_args={"rollout_sample_filter_path": "mine.remove"})


async def test_a_grader_is_told_the_prompt_and_an_empty_rm_type_is_none() -> None:
    seen: list[Any] = []

    def grader(response: str, label: Any, metadata: Mapping[str, Any]) -> Verdict:
        seen.append((response, label, metadata[PROMPT_KEY]))
        return Verdict(reward=0.5)

    sample = SlimeSample(prompt="what?", response="this", label="that", metadata={"rm_type": ""})
    hub = RewardHub(graders={"mine": grader}, timeout_seconds=30.0)
    assert await graded(hub, sample, rm_type="mine") == 0.5
    assert seen == [("this", "that", "what?")]
