"""What can be known of a slime plug-in is refused in one line before anything starts; the rest ends the run in one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rollfeed
from rollfeed.compat.slime_plugins import with_slime_plugins
from rollfeed.errors import PluginError, RunFailedError

WriteText = Callable[[str], Path]


def one(sample: Any, prompt: Any) -> float:
    return 1.0


def set_up(folder: Path, **plugins: Any) -> None:
    config = rollfeed.RolloutConfig(plugins=rollfeed.PluginSettings(**plugins))
    with_slime_plugins(config, folders=[folder])


@pytest.mark.parametrize(
    ("text", "plugins", "message"),
    [
        ("x = 1\n", {"reward": "slime:mine.f"}, r"plugins.reward = 'slime:mine.f': mine has no 'f'; it has x"),
        ("x = 1\n", {"reward": "slime:no_such.f"}, r"no module 'no_such'"),
        ("f = 1\n", {"reward": "slime:mine.f"}, r"is a int, not a function"),
        (
            "async def f(sample): return 1.0\n",
            {"reward": "slime:mine.f"},
            r"too many positional arguments; slime calls it with \(args, sample\) \(.*mine.py:1\)",
        ),
        (
            "async def f(args, samples): return True\n",
            {"group_filters": ["slime:mine.f"]},
            r"is async, and slime calls it without await \(.*mine.py:1\)",
        ),
        (
            "from slime.utils.wandb_utils import init\nasync def f(args, sample): return 1.0\n",
            {"reward": "slime:mine.f"},
            r"slime\.utils\.wandb_utils is not supplied .*mine.py:1",
        ),
        (
            "from slime.rollout.rm_hub import compute_unknown\nasync def f(args, sample): return 1.0\n",
            {"reward": "slime:mine.f"},
            r"slime\.rollout\.rm_hub\.compute_unknown is not supplied .*async_rm.*mine.py:1",
        ),
        (
            "async def f(args, sample):\n    from slime.utils.types import ParamInfo\n    return 1.0\n",
            {"reward": "slime:mine.f"},
            r"slime\.utils\.types\.ParamInfo is not supplied; there is Sample.* \(.*mine.py:2\)",
        ),
        (
            "async def f(args, sample):\n    return args.my_bonus\n",
            {"reward": "slime:mine.f"},
            r"args.my_bonus has no counterpart .*\[plugins.slime_args\] \(.*mine.py:2\)",
        ),
        (
            "async def f(args, sample):\n    args.rm_type = 'math'\n    return 1.0\n",
            {"reward": "slime:mine.f"},
            r"args.rm_type: args cannot be set, but for a copy \(.*mine.py:2\)",
        ),
        (
            "async def f(args, sample): return 1.0\n",
            {"reward": "slime_drop:mine.f"},
            "slime_drop: is for group_filters",
        ),
        ("class Tracker: pass\n", {"tracker": "slime:mine.Tracker"}, "slime has no such function"),
        (
            "class S:\n    def __init__(self): pass\n",
            {"prompt_source": "slime:mine.S"},
            r"slime calls it with \(args\)",
        ),
    ],
)
def test_a_plugin_that_cannot_work_is_refused_when_the_run_is_set_up(
    write_plugins: WriteText, text: str, plugins: dict[str, Any], message: str
) -> None:
    folder = write_plugins(text)
    with pytest.raises(PluginError, match=message) as caught:
        set_up(folder, **plugins)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "body",
    ["getattr(args, 'my_bonus', 1.0)", "args.my_bonus if hasattr(args, 'my_bonus') else 1.0"],
)
def test_an_argument_that_is_asked_for_with_care_may_be_missing(write_plugins: WriteText, body: str) -> None:
    set_up(write_plugins(f"async def f(args, sample): return {body}\n"), reward="slime:mine.f")


def test_what_else_is_in_the_file_is_not_looked_at(write_plugins: WriteText) -> None:
    text = "async def f(args, sample): return 1.0\ndef main(args):\n    import slime.ray\n    return args.port\n"
    set_up(write_plugins(text), reward="slime:mine.f")
    used = text.replace("return 1.0", "return main(args)")
    (write_plugins("") / "more.py").write_text(used)
    with pytest.raises(PluginError, match=r"slime.ray is not supplied|args.port has no counterpart"):
        set_up(write_plugins(""), reward="slime:more.f")


def test_arguments_are_given_in_the_settings(write_plugins: WriteText) -> None:
    folder = write_plugins("async def f(args, sample):\n    return args.my_bonus\n")
    set_up(folder, reward="slime:mine.f", slime_args={"my_bonus": 2})


_GENERATE = """
from slime.utils.types import Sample
from slime.rollout.sglang_rollout import generate
async def f(args, sample, sampling_params):
    {}
    made = await generate(args, sample, sampling_params)
    {}
    return made
"""
_NO_BUDGET = {"rollout": {"failure_minimum": 1, "failure_budget": 0.0}}


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("pass", "made = None", "returned None; it must return a Sample, or a list"),
        ("pass", "made.response_length += 100", r"response_length = \d+ and \d+ tokens"),
        ("pass", "made.loss_mask = [1]", "1 entries in loss_mask and response_length = 2"),
        (
            "pass",
            "made.rollout_log_probs = [-9.0, -9.0]",
            r"rollout_log_probs\[0\] = -9, where the engine's",
        ),
        (
            "pass",
            "made.rollout_log_probs = None; made.tokens[-2] = 65",
            "token 0 is trained on and was not sampled",
        ),
        ("pass", "made.group_index += 1", "a sample of group 1 for one of group 0"),
        ("pass", "made.label = 'other'", "a sample whose label is another than its prompt's"),
        ("pass", "made.status = Sample.Status.PENDING", "a sample whose status is pending"),
        ("pass", "made.tokens = ['a', 'b']", "they must be a list of token ids"),
        ("pass", "made.teacher_log_probs = [0.0]", "teacher_log_probs, which has no counterpart"),
        ("sampling_params['regex'] = 'a+'", "pass", r"sampling_params\['regex'\] = 'a\+'"),
        ("import copy; own = copy.copy(args); own.x = 1; 1 / 0", "pass", "ZeroDivisionError"),
    ],
)
async def test_what_a_generate_function_does_wrong_is_said_with_its_file_and_line(
    write_plugins: WriteText, make_batches: Callable[..., Any], before: str, after: str, message: str
) -> None:
    folder = write_plugins(_GENERATE.format(before, after))
    with pytest.raises(RunFailedError, match=message) as caught:
        await make_batches(
            1, folder=folder, generate="slime:mine.f", reward_fn=lambda sample, prompt: 1.0, **_NO_BUDGET
        )
    assert "plugins.generate (mine:f)" in str(caught.value) or "mine.py" in str(caught.value)
    assert "mine.py:" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "plugins", "message"),
    [
        (
            "def f(args, samples):\n    samples[0].tokens.append(1)\n    return True\n",
            {"group_filters": ["slime:mine.f"]},
            r"plugins.group_filters \(mine:f\) changed tokens of sample 0.*mine.py:1",
        ),
        (
            "def f(args, samples):\n    return 'keep'\n",
            {"group_filters": ["slime:mine.f"]},
            "returned 'keep'; it must return a DynamicFilterOutput, or True to keep",
        ),
        (
            "from slime.rollout.filter_hub.base_types import DynamicFilterOutput\n"
            "def f(args, samples):\n    return DynamicFilterOutput(keep=True)\n",
            {"group_filters": ["slime_drop:mine.f"]},
            r"it must return True \(drop\) or False \(keep\)",
        ),
        (
            "def f(args, groups):\n    return groups[0]\n",
            {"batch_filter": "slime:mine.f", "rollout": {"over_sampling_batch_size": 4}},
            "it must return a list of the groups that it was given",
        ),
        (
            "def f(args, samples):\n    return [1.0]\n",
            {"advantage": "slime:mine.f"},
            r"returned \[1.0\]; it must return \(raw rewards, processed rewards\), 4 numbers each",
        ),
        (
            "def f(args, sample):\n    return 3\n",
            {"sample_hook": "slime:mine.f", **_NO_BUDGET},
            "returned 3; it must return a Sample",
        ),
        (
            "async def f(args, sample):\n    sample.response_length = 0\n    return 1.0\n",
            {"reward_fn": "slime:mine.f", **_NO_BUDGET},
            "changed response_length of sample 0",
        ),
        (
            "def f(args, rollout_id, data_source, evaluation=False):\n    return 5\n",
            {"rollout_fn": "slime:mine.f"},
            "returned 5; it must return a RolloutFnTrainOutput, a list of groups",
        ),
        (
            "def f(args, rollout_id, data_source):\n    return [g[:1] for g in data_source(3)]\n",
            {"rollout_fn": "slime:mine.f"},
            "returned a group of 1, where n_samples_per_prompt is 4",
        ),
    ],
)
async def test_what_another_function_does_wrong_ends_the_run_in_one_line(
    write_plugins: WriteText, make_batches: Callable[..., Any], text: str, plugins: dict[str, Any], message: str
) -> None:
    plugins = {"reward_fn": lambda sample, prompt: float(sample.index), **plugins}
    with pytest.raises(RunFailedError, match=message) as caught:
        await make_batches(1, folder=write_plugins(text), **plugins)
    assert "\n" not in str(caught.value)
    assert "mine.py:" in str(caught.value)
