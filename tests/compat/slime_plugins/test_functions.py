"""Each form of slime's functions does in a run what the native one does."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollfeed
from rollfeed.compat.slime_plugins import placing, shared_run, slime_run, with_slime_plugins
from rollfeed.compat.slime_plugins.names.slime_sample import Sample
from rollfeed.compat.slime_plugins.slime_args import slime_arguments
from rollfeed.config import PluginSettings, RolloutConfig, RolloutSettings, Settings
from rollfeed.generate import default_generate
from rollfeed.protocols import Services
from rollfeed.testing import CharTokenizer, ScriptedEngine, TickEngine, make_group, make_prompt, make_request
from rollfeed.types import Keep

EXAMPLES = Path(__file__).parents[3] / "examples" / "slime"
WriteText = Callable[[str], Path]


SETTINGS = """
seed = 1
model.checkpoint = "tiny"
engine = {context_length = 128, threads = 1}
rollout = {num_rollout = 2, rollout_batch_size = 2, n_samples_per_prompt = 2}
sampling.rollout_max_response_len = 8
[plugins]
prompt_source = "slime:slime_environment.AdditionSource"
reward = "slime:slime_environment.check"
generate = "slime:slime_search.generate"
rollout = "slime:slime_rollout.generate_rollout"
[plugins.slime_args]
max_turns = 2
rollout_all_samples_process_path = "slime_environment.learn"
"""


async def digit(sample: Any, prompt: Any) -> float:
    """Awaited, as threads would end in any order."""
    return float(int(sample.response[0]) > 4)


async def one(sample: Any, prompt: Any) -> float:
    return 1.0


def told(batches: list[Any]) -> list[Any]:
    return [
        (s.token_ids.tolist(), s.loss_mask.tolist(), s.logprobs.tolist(), s.version_spans, s.reward, s.index, s.status)
        for batch in batches
        for s in batch.samples
    ]


@pytest.mark.parametrize(
    "text",
    [
        "async def f(args, sample, sampling_params):\n    return await generate(args, sample, sampling_params)\n",
        "async def f(args, sample, sampling_params, evaluation=False):\n"
        "    assert evaluation is False\n    return [await generate(args, sample, sampling_params)]\n",
        "from miles.rollout.base_types import GenerateFnOutput\n"
        "async def f(input):\n"
        "    made = await generate(input.args, input.sample, input.sampling_params)\n"
        "    return GenerateFnOutput(samples=made)\n",
        "async def f(args, sample, sampling_params):\n"
        "    url = f'http://{args.sglang_router_ip}:{args.sglang_router_port}/generate'\n"
        "    ids = GenerateState(args).tokenizer(sample.prompt, add_special_tokens=False)['input_ids']\n"
        "    out = await post(url, {'input_ids': ids, 'sampling_params': sampling_params}, use_http2=True)\n"
        "    sample.tokens = ids + out['output_ids']\n"
        "    sample.response, sample.response_length = out['text'], len(out['output_ids'])\n"
        "    sample.status = Sample.Status.COMPLETED\n"
        "    return sample\n",
    ],
    ids=["plain", "list", "miles", "post without logprobs"],
)
async def test_a_generate_function_gives_the_batches_of_the_built_in_one(
    write_plugins: WriteText, make_batches: Callable[..., Any], text: str
) -> None:
    names = (
        "from slime.rollout.sglang_rollout import GenerateState, generate\n"
        "from slime.utils.http_utils import post\nfrom slime.utils.types import Sample\n"
    )
    theirs = await make_batches(2, folder=write_plugins(names + text), generate="slime:mine.f", reward_fn=digit)
    assert told(theirs) == told(await make_batches(2, reward_fn=digit))


async def test_a_generate_function_is_told_of_an_evaluation(write_plugins: WriteText) -> None:
    folder = write_plugins(
        "from slime.rollout.sglang_rollout import generate\n"
        "async def f(args, sample, sampling_params, evaluation=False):\n"
        "    sample.metadata['evaluation'] = evaluation\n"
        "    return await generate(args, sample, sampling_params)\n"
    )
    config = rollfeed.RolloutConfig(plugins=rollfeed.PluginSettings(generate="slime:mine.f"))
    function = with_slime_plugins(config, folders=[folder]).plugins.generate
    request = make_request(make_prompt(), max_new_tokens=4, max_context_length=100, evaluation=True)
    async with ScriptedEngine() as engine:
        services = Services(endpoint=engine, tokenizer=CharTokenizer(), default=default_generate)
        (sample,) = await function(request, services=services)
    assert sample.metadata["evaluation"] is True


async def test_aborted_answers_are_gone_on_with(
    write_plugins: WriteText, make_batches: Callable[..., Any], tick_like: Any
) -> None:
    text = (
        "from slime.rollout.sglang_rollout import generate\n"
        "async def f(args, sample, sampling_params):\n    return await generate(args, sample, sampling_params)\n"
    )
    chosen = {"mode": "partial", "over_sampling_batch_size": 6}
    settings = {"rollout": chosen, "reward_fn": one, "max_response_len": 40}
    theirs = await make_batches(4, folder=write_plugins(text), generate="slime:mine.f", engine=tick_like(), **settings)
    ours = await make_batches(4, engine=tick_like(), **settings)
    assert told(theirs) == told(ours)
    assert any("start_rollout_id" in sample.metadata for batch in theirs for sample in batch.samples)


async def test_a_reward_brought_by_the_generate_function_is_kept(
    write_plugins: WriteText, make_batches: Callable[..., Any]
) -> None:
    text = (
        "from slime.rollout.sglang_rollout import generate\n"
        "async def f(args, sample, sampling_params):\n"
        "    sample = await generate(args, sample, sampling_params)\n"
        "    sample.reward, sample.metadata['seen'] = 0.25, True\n    return sample\n"
    )
    (batch,) = await make_batches(1, folder=write_plugins(text), generate="slime:mine.f", reward_fn=digit)
    assert {sample.reward for sample in batch.samples} == {0.25}
    assert all(sample.metadata["seen"] for sample in batch.samples)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("reward_fn", "async def f(args, sample, **kwargs): return float(int(sample.response[0]) > 4)\n"),
        ("reward_fn", "def f(args, sample): return float(int(sample.response[0]) > 4)\n"),
        ("batched_reward", "async def f(args, samples): return [float(int(s.response[0]) > 4) for s in samples]\n"),
        ("group_reward", "async def f(args, samples): return [float(int(s.response[0]) > 4) for s in samples]\n"),
        (
            "reward_fn",
            "from slime.rollout.rm_hub import async_rm\n"
            "async def f(args, sample):\n"
            "    sample.response = '\\\\boxed{' + str(int(int(sample.response[0]) > 4)) + '}'\n"
            "    sample.label, sample.metadata = '1', {'rm_type': 'math'}\n"
            "    return await async_rm(args, sample)\n",
        ),
    ],
)
async def test_a_reward_function_gives_the_batches_of_a_native_one(
    write_plugins: WriteText, make_batches: Callable[..., Any], key: str, text: str
) -> None:
    theirs = await make_batches(2, folder=write_plugins(text), **{key: "slime:mine.f"})
    assert told(theirs) == told(await make_batches(2, reward_fn=digit))


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("slime:slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std", "zero_std_0.0"),
        ("slime:mine.keep", "keep"),
    ],
)
async def test_a_dropped_group_is_counted_by_its_reason(
    write_plugins: WriteText, make_batches: Callable[..., Any], path: str, reason: str
) -> None:
    folder = write_plugins("def keep(args, samples): return len({s.reward for s in samples}) > 1\n")
    batches = await make_batches(4, folder=folder, reward_fn=digit, group_filters=[path])
    found = sum(batch.metrics.get(f"rollout/dynamic_filter/drop_{reason}", 0.0) for batch in batches)
    assert found > 0
    assert all(np.ptp(group.reward_values()) > 0 for batch in batches for group in batch.groups)


def test_a_filter_finds_its_own_run_where_another_has_been_set_up_since(write_plugins: WriteText) -> None:
    text = (
        "from slime.rollout.sglang_rollout import GenerateState\n"
        "def f(args, samples): return bool(GenerateState(args).tokenizer.encode('a'))\n"
    )
    config = RolloutConfig(plugins=PluginSettings(group_filters=("slime:mine.f",)))
    first, _ = (with_slime_plugins(config, folders=[write_plugins(text)]) for _ in range(2))
    run, (keep,) = slime_run(first), first.plugins.group_filters
    assert run is not None
    run.tokenizer = CharTokenizer()
    assert keep(make_group([0.0, 1.0]).samples) == Keep()


async def test_an_over_sampling_filter_chooses_as_the_native_one(make_batches: Callable[..., Any]) -> None:
    path = "slime:slime.rollout.filter_hub.over_sampling_filters.sort_by_reward_std"
    chosen = {"rollout": {"over_sampling_batch_size": 5}, "reward_fn": digit}
    theirs = await make_batches(2, batch_filter=path, **chosen)
    native = {"over_sampling": {"name": "reward_std"}}
    assert told(theirs) == told(await make_batches(2, filters=native, **chosen))


async def test_a_buffer_filter_chooses_who_is_answered_next(
    write_plugins: WriteText, make_batches: Callable[..., Any], tick_like: Any
) -> None:
    text = (
        "def last(args, rollout_id, buffer, num_samples):\n"
        "    assert rollout_id is None\n"
        "    taken = buffer[::-1][:num_samples]\n"
        "    for group in taken:\n        buffer.remove(group)\n    return taken\n"
    )

    def newest(entries: Any, count: int, *, policy_version: int) -> list[int]:
        return list(range(len(entries)))[::-1][:count]

    settings = {
        "rollout": {"mode": "partial", "over_sampling_batch_size": 6},
        "reward_fn": one,
        "max_response_len": 40,
    }
    theirs = await make_batches(
        4, folder=write_plugins(text), engine=tick_like(), buffer_policy="slime:mine.last", **settings
    )
    assert told(theirs) == told(await make_batches(4, engine=tick_like(), buffer_policy=newest, **settings))


async def test_processed_rewards_are_the_advantages(write_plugins: WriteText, make_batches: Callable[..., Any]) -> None:
    text = (
        "def f(args, samples):\n"
        "    rewards = [s.get_reward_value(args) for s in samples]\n"
        "    return rewards, [2 * r for r in rewards]\n"
    )
    (batch,) = await make_batches(1, folder=write_plugins(text), reward_fn=digit, advantage="slime:mine.f")
    np.testing.assert_allclose(batch.advantages_S, [2 * sample.reward for sample in batch.samples])


@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_a_sample_hook_changes_samples_before_they_are_scored(
    write_plugins: WriteText, make_batches: Callable[..., Any], kind: str
) -> None:
    text = f"{kind} f(args, sample, **kwargs):\n    sample.metadata['hooked'] = 1\n    sample.loss_mask[-1] = 0\n"
    (batch,) = await make_batches(1, folder=write_plugins(text), reward_fn=digit, sample_hook="slime:mine.f")
    assert all(sample.metadata["hooked"] == 1 and sample.loss_mask[-1] == 0 for sample in batch.samples)


def test_a_settings_file_with_slime_paths_is_run_and_gone_on_with(
    tmp_path: Path, start_rollfeed: Callable[..., Any]
) -> None:
    for name in ("slime_environment", "slime_search", "slime_rollout"):
        (tmp_path / f"{name}.py").write_text((EXAMPLES / f"{name}.py").read_text())
    (tmp_path / "run.toml").write_text(SETTINGS)
    out = tmp_path / "out"
    first = start_rollfeed("run", tmp_path / "run.toml", "--out", out, "--quiet")
    assert first.wait(timeout=300) == 0, first.read()
    second = start_rollfeed("run", "--resume", out, "--step", "0", "--set", "rollout.num_rollout=3", "--quiet")
    assert second.wait(timeout=300) == 0, second.read()
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1, 2]


def test_the_functions_and_the_source_of_a_run_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slime_environment.py").write_text((EXAMPLES / "slime_environment.py").read_text())
    keys = {"prompt_source": "slime:slime_environment.AdditionSource", "reward": "slime:slime_environment.check"}
    settings = Settings.model_validate({"model": {"checkpoint": "tiny"}, "plugins": keys})
    begun: list[Any] = []
    monkeypatch.setattr(placing, "begin", lambda run: begun.append(run) or shared_run.begin(run))
    prepared = rollfeed.prepare(rollfeed.RunSpec(settings, (tmp_path,)))
    assert begun == [prepared.functions.slime]


async def test_a_bare_callable_is_a_data_source(write_plugins: WriteText, open_source: Callable[..., Any]) -> None:
    text = (
        "from slime.utils.types import Sample\n"
        "def source(num_samples):\n"
        "    return [[Sample(prompt='2 + 2 =', label='4') for _ in range(4)] for _ in range(num_samples)]\n"
    )
    source = open_source(write_plugins(text), prompt_source="slime:mine.source")
    prompts = await source.draw(2)
    assert [(prompt.text, prompt.label) for prompt in prompts] == [("2 + 2 =", "4")] * 2


@pytest.mark.parametrize(
    "text",
    [
        "def f(args, rollout_id, data_source, evaluation=False):\n"
        "    return generate_rollout(args, rollout_id, data_source, evaluation)\n",
        "def f(args, rollout_id, data_source, evaluation=False):\n"
        "    return generate_abortable_samples(args, rollout_id, data_source)\n",
        "async def f(args, rollout_id, data_source, evaluation=False):\n"
        "    state = GenerateState(args)\n"
        "    groups = data_source(args.rollout_batch_size)\n"
        "    params = state.sampling_params\n"
        "    return [await generate_and_rm_group(args, g, params.copy()) for g in groups]\n",
        "async def f(args, rollout_id, data_source, evaluation=False):\n"
        "    groups = data_source.get_samples(args.rollout_batch_size)\n"
        "    params = GenerateState(args).sampling_params\n"
        "    for group in groups:\n"
        "        for sample in group:\n"
        "            await one(args, sample, params)\n"
        "    return groups\n"
        "async def one(args, sample, params):\n"
        "    made = await generate_and_rm(args, sample, params)\n"
        "    assert made is sample\n",
    ],
    ids=["generate_rollout", "abortable", "groups", "samples"],
)
async def test_a_rollout_function_makes_the_batches_of_the_scheduler(
    write_plugins: WriteText, make_batches: Callable[..., Any], text: str
) -> None:
    names = (
        "from slime.rollout.sglang_rollout import (GenerateState, generate, generate_and_rm, generate_and_rm_group,\n"
        "    generate_rollout, generate_abortable_samples)\n"
    )
    folder = write_plugins(names + text)
    reward = {"rm_type": "random"}
    theirs = await make_batches(2, folder=folder, reward=reward, rollout_fn="slime:mine.f")
    ours = await make_batches(2, reward=reward)
    assert [row[:4] for row in told(theirs)] == [row[:4] for row in told(ours)]


async def test_a_rollout_function_may_ask_the_engine_itself(
    write_plugins: WriteText, make_batches: Callable[..., Any]
) -> None:
    text = (
        "from slime.rollout.base_types import RolloutFnTrainOutput\n"
        "from slime.rollout.sglang_rollout import GenerateState, generate\n"
        "from slime.utils.async_utils import run\n"
        "async def answer(args, groups):\n"
        "    params = GenerateState(args).sampling_params\n"
        "    for sample in (sample for group in groups for sample in group):\n"
        "        await generate(args, sample, params)\n"
        "        sample.reward = float(sample.index)\n"
        "def f(args, rollout_id, data_source, evaluation=False):\n"
        "    groups = data_source.get_samples(args.rollout_batch_size)\n"
        "    run(answer(args, groups))\n"
        "    return RolloutFnTrainOutput(samples=groups)\n"
    )
    batches = await make_batches(2, folder=write_plugins(text), reward_fn=digit, rollout_fn="slime:mine.f")
    assert [group.group_index for batch in batches for group in batch.groups] == list(range(6))
    assert [sample.reward for batch in batches for sample in batch.samples] == [float(n) for n in range(24)]
    assert all(sample.logprobs.any() and sample.response_length for batch in batches for sample in batch.samples)


async def test_a_rollout_function_may_post_from_a_loop_of_its_own(
    write_plugins: WriteText, make_batches: Callable[..., Any]
) -> None:
    text = (
        "import asyncio\n"
        "from slime.rollout.sglang_rollout import get_model_url\n"
        "from slime.utils.http_utils import post\n"
        "from slime.utils.types import Sample\n"
        "async def answer(args, sample):\n"
        "    payload = {'text': sample.prompt, 'sampling_params': {'max_new_tokens': 4}, 'return_logprob': True}\n"
        "    out = await post(get_model_url(args, 'default'), payload)\n"
        "    sample.tokens = [ord(each) for each in sample.prompt] + out['output_ids']\n"
        "    sample.response, sample.response_length = out['text'], len(out['output_ids'])\n"
        "    sample.reward, sample.status = 1.0, Sample.Status.COMPLETED\n"
        "async def f(args, rollout_id, data_source, evaluation=False):\n"
        "    groups = data_source(args.rollout_batch_size)\n"
        "    await asyncio.gather(*(answer(args, sample) for group in groups for sample in group))\n"
        "    return groups, []\n"
    )
    batches = await make_batches(2, folder=write_plugins(text), reward_fn=digit, rollout_fn="slime:mine.f")
    assert all(sample.logprobs.any() for batch in batches for sample in batch.samples)


async def test_aborted_groups_that_are_given_back_are_gone_on_with(
    make_batches: Callable[..., Any], tick_like: Any
) -> None:
    batches = await make_batches(
        4,
        rollout={"mode": "partial", "over_sampling_batch_size": 6},
        engine=tick_like(),
        reward_fn=one,
        max_response_len=40,
        rollout_fn="slime:slime_rollout.generate_rollout",
    )
    indices = [group.group_index for batch in batches for group in batch.groups]
    assert len(set(indices)) == 12
    assert any("start_rollout_id" in sample.metadata for batch in batches for sample in batch.samples)


@pytest.fixture
def tick_like() -> Callable[[], Any]:
    """Return a factory of engines that answer groups of the same step with different lengths."""
    return lambda: TickEngine(lambda rollout: 2 + 5 * (rollout // 4 % 6), slots=64)


def test_a_sample_keeps_its_parts_together() -> None:
    sample = Sample(prompt="p", tokens=[1, 2])
    sample.append_response_tokens(None, tokens=[3], log_probs=[-1.0], text="a")
    sample.append_response_tokens(None, tokens=[4, 5], trainable=False, text="b")
    reply = {"finish_reason": {"type": "stop"}, "weight_version": "7", "cached_tokens": 1, "prompt_tokens": 4}
    sample.append_response_tokens(None, tokens=[6], log_probs=[-2.0], meta_info=reply, text="c")
    assert (sample.tokens, sample.response, sample.response_length) == ([1, 2, 3, 4, 5, 6], "abc", 4)
    assert (sample.loss_mask, sample.rollout_log_probs) == ([1, 0, 0, 1], [-1.0, 0.0, 0.0, -2.0])
    assert (sample.status, sample.weight_versions) == (Sample.Status.COMPLETED, ["7"])
    assert sample.effective_response_length == 2


@pytest.mark.parametrize(
    ("reason", "status"),
    [("stop", "completed"), ("length", "truncated"), ("abort", "aborted"), ("other", "pending")],
)
def test_a_finish_reason_sets_the_status(reason: str, status: str) -> None:
    sample = Sample()
    sample.update_from_meta_info(None, {"finish_reason": {"type": reason}})
    assert sample.status.value == status


def test_a_sample_goes_through_its_dictionary_with_unknown_keys() -> None:
    sample = Sample(prompt="p", tokens=[1], status=Sample.Status.TRUNCATED, metadata={"a": 1})
    record = {**sample.to_dict(), "trace": [1]}
    again = Sample.from_dict(record)
    assert again.trace == [1]  # type: ignore[attr-defined]
    assert again.to_dict() == record


def test_a_copy_of_the_arguments_can_be_changed_and_they_cannot() -> None:
    args = slime_arguments(RolloutConfig())
    for own in (copy.copy(args), copy.deepcopy(args)):
        own.rm_type = "math"
        assert (own.rm_type, args.rm_type) == ("math", None)
    with pytest.raises(AttributeError, match=r"args.rm_type: args are the settings of the run and cannot be set"):
        args.rm_type = "math"


def test_counters_are_added_up_and_go_through_the_dictionary() -> None:
    sample = Sample()
    for _ in range(2):
        sample.prefix_cache_info.add({"cached_tokens": 1, "prompt_tokens": 4})
        sample.spec_info.add({"spec_accept_token_num": 3, "spec_draft_token_num": 4, "completion_tokens": 5})
    again = Sample.from_dict(sample.to_dict())
    assert again.prefix_cache_info.prefix_cache_hit_rate == 0.25
    assert (again.spec_info.spec_accept_rate, again.spec_info.completion_token_num) == (0.75, 10)


def test_arguments_have_the_settings_under_slimes_names() -> None:
    settings = Settings.model_validate(
        {
            "rollout": {"mode": "partial", "rollout_batch_size": 2, "over_sampling_batch_size": 6},
            "prompts": {"datasets": [{"path": "d.jsonl", "input_key": "question", "label_key": "answer"}]},
            "engine": {"sglang": {"router": "http://10.0.0.1:3000"}},
            "plugins": {"reward": "slime:mine.f", "slime_args": {"max_turns": 3, "rollout_seed": 42}},
        }
    )
    args = slime_arguments(settings)
    assert (args.partial_rollout, args.rollout_batch_size, args.over_sampling_batch_size) == (True, 2, 6)
    assert (args.input_key, args.label_key, args.prompt_data) == ("question", "answer", "d.jsonl")
    assert (args.sglang_router_ip, args.sglang_router_port) == ("10.0.0.1", 3000)
    assert (args.custom_rm_path, args.max_turns, args.rollout_seed) == ("mine.f", 3, 42)
    with pytest.raises(AttributeError, match=r"args.unknown has no counterpart"):
        _ = args.unknown
    assert RolloutConfig(rollout=RolloutSettings()).plugins.slime_args == {}
