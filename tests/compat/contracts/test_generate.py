"""One request of a generate function: what it is handed, what the engine is asked, what it answers."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rollfeed.testing import CharTokenizer, ScriptedEngine, TickEngine

WriteText = Callable[[str], Path]
STRICT = {"failure_minimum": 1, "failure_budget": 0.0}
"""Of ``[rollout]``: what a plug-in asserts ends the run."""


async def one(sample: Any, prompt: Any) -> float:
    """Awaited: a thread would take longer than the engine for an answer."""
    return 1.0


@pytest.fixture
def answer(write_plugins: WriteText, make_batches: Callable[..., Any]) -> Callable[..., Any]:
    """Return an async function that makes batches of what ``f`` of a plug-in answers; what it asserts ends the run."""

    async def make(text: str, num_batches: int = 1, *, rollout: Mapping[str, Any] = {}, **others: Any) -> list[Any]:
        settings = {"rollout": {**STRICT, **rollout}, "reward_fn": one, **others}
        return await make_batches(num_batches, folder=write_plugins(text), generate="slime:mine.f", **settings)

    return make


async def test_a_function_is_handed_the_sampling_under_the_engines_names(answer: Any) -> None:
    text = (
        "from slime.rollout.sglang_rollout import generate\n"
        "async def f(args, sample, sampling_params):\n"
        "    assert sampling_params == {\n"
        "        'temperature': 0.7, 'top_p': 0.9, 'top_k': 20, 'max_new_tokens': 8, 'min_new_tokens': 2,\n"
        "        'repetition_penalty': 1.1, 'stop': ['x'], 'stop_token_ids': [5], 'skip_special_tokens': True,\n"
        "        'no_stop_trim': True, 'spaces_between_special_tokens': False}, sampling_params\n"
        "    before = dict(sampling_params)\n"
        "    made = await generate(args, sample, sampling_params)\n"
        "    assert sampling_params == before\n"  # slime subtracts what a resumed answer has
        "    return made\n"
    )
    sampling = {
        "rollout_temperature": 0.7,
        "rollout_top_p": 0.9,
        "rollout_top_k": 20,
        "min_new_tokens": 2,
        "repetition_penalty": 1.1,
        "rollout_stop": ("x",),
        "rollout_stop_token_ids": (5,),
        "rollout_skip_special_tokens": True,
    }
    await answer(text, sampling=sampling)


async def test_a_new_sample_has_its_prompt_and_its_places(answer: Any) -> None:
    text = (
        "from slime.rollout.sglang_rollout import generate\n"
        "from slime.utils.types import Sample\n"
        "async def f(args, sample, sampling_params):\n"
        "    assert (sample.status, sample.tokens, sample.response_length) == (Sample.Status.PENDING, [], 0)\n"
        "    assert sample.index == sample.group_index * args.n_samples_per_prompt + sample.index % 4\n"
        "    assert sample.rollout_id == sample.index and sample.session_id\n"
        "    assert sample.prompt == f'prompt {sample.group_index}' and sample.label == str(sample.group_index)\n"
        "    return await generate(args, sample, sampling_params)\n"
    )
    batches = await answer(text, 2)
    assert [sample.index for batch in batches for sample in batch.samples] == list(range(24))


async def test_the_first_turn_sets_the_prompts_tokens_and_the_end_its_status(answer: Any) -> None:
    text = (
        "from slime.rollout.sglang_rollout import generate\n"
        "from slime.utils.types import Sample\n"
        "async def f(args, sample, sampling_params):\n"
        "    made = await generate(args, sample, sampling_params)\n"
        "    assert made is sample\n"
        "    ids = [ord(each) for each in sample.prompt]\n"
        "    assert sample.tokens[:len(ids)] == ids and len(sample.tokens) == len(ids) + sample.response_length\n"
        "    assert len(sample.rollout_log_probs) == sample.response_length and sample.weight_versions == ['0']\n"
        "    ended = Sample.Status.TRUNCATED if sample.response_length == 8 else Sample.Status.COMPLETED\n"
        "    assert sample.status is ended\n"
        "    assert sample.prefix_cache_info.total_prompt_tokens == len(ids)\n"
        "    return made\n"
    )
    engine = ScriptedEngine(answer=lambda request: "9" * (1 + request.params.seed % 20))
    (batch,) = await answer(text, engine=engine)
    assert {sample.status.value for sample in batch.samples} == {"completed", "truncated"}


async def test_a_sample_without_budget_is_truncated_without_a_request_and_a_finished_one_refused(answer: Any) -> None:
    text = (
        "from slime.rollout.sglang_rollout import generate\n"
        "from slime.utils.types import Sample\n"
        "async def f(args, sample, sampling_params):\n"
        "    made = await generate(args, sample, sampling_params)\n"
        "    try:\n        await generate(args, made, sampling_params)\n"
        "    except ValueError as error:\n        assert f'sample {sample.index} is completed already' in str(error)\n"
        "    made.status = Sample.Status.ABORTED\n"
        "    for left in (0, -1):\n"
        "        params = {**sampling_params, 'max_new_tokens': made.response_length + left}\n"
        "        await generate(args, made, params)\n"
        "        assert made.status is Sample.Status.TRUNCATED\n"
        "        made.status = Sample.Status.ABORTED\n"
        "    made.status = Sample.Status.COMPLETED\n"
        "    return made\n"
    )
    engine = ScriptedEngine()
    await answer(text, engine=engine)
    assert len(engine.requests) == 12


async def test_an_aborted_answer_asks_for_the_rest_only_and_goes_on_behind_its_tokens(answer: Any) -> None:
    text = (
        "from slime.rollout.sglang_rollout import generate\n"
        "async def f(args, sample, sampling_params):\n"
        "    before = list(sample.tokens), list(sample.rollout_log_probs or [])\n"
        "    made = await generate(args, sample, sampling_params)\n"
        "    assert made.tokens[:len(before[0])] == before[0]\n"
        "    assert made.rollout_log_probs[:len(before[1])] == before[1]\n"
        "    return made\n"
    )
    engine = TickEngine(lambda rollout: 2 + 5 * (rollout // 4 % 6), slots=64)
    partial = {"mode": "partial", "over_sampling_batch_size": 6}
    await answer(text, 4, engine=engine, rollout=partial, max_response_len=40)
    resumed = [num_tokens for _, num_tokens in engine.asked if num_tokens]
    assert resumed


async def test_a_reply_has_text_tokens_logprobs_and_the_end(answer: Any) -> None:
    text = (
        "from slime.rollout.sglang_rollout import generate\n"
        "from slime.utils.http_utils import get, post\n"
        "async def f(args, sample, sampling_params):\n"
        "    url = f'http://{args.sglang_router_ip}:{args.sglang_router_port}'\n"
        "    payload = {'text': sample.prompt, 'sampling_params': sampling_params, 'return_logprob': True,\n"
        "               'stream': False, 'rid': 'mine', 'return_routed_experts': False}\n"
        "    headers = {'X-SMG-Routing-Key': sample.session_id}\n"
        "    out = await post(f'{url}/generate', payload, headers=headers)\n"
        "    meta = out['meta_info']\n"
        "    assert meta['finish_reason'] == {'type': 'stop', 'matched': 3}\n"
        "    assert meta['output_token_logprobs'] == [[-1.0, each, None] for each in out['output_ids']]\n"
        "    assert (meta['prompt_tokens'], meta['completion_tokens']) == (len(sample.prompt), 2)\n"
        "    assert meta['cached_tokens'] == 0\n"
        "    assert meta['weight_version'] == '0' and meta['e2e_latency'] == 0.0 and out['text'].isdigit()\n"
        "    assert [each['url'] for each in (await get(f'{url}/workers'))['workers']] == [url]\n"
        "    assert (await get(f'{url}/list_workers'))['urls'] == [url]\n"
        "    quiet = await post(f'{url}/generate', {**payload, 'return_logprob': False})\n"
        "    assert 'output_token_logprobs' not in quiet['meta_info']\n"
        "    return await generate(args, sample, sampling_params)\n"
    )
    await answer(text)


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        ("{'sampling_seed': 11}", True),
        ("{'n': 1, 'ignore_eos': False, 'custom_params': {'return_top_p_token_ids': True}}", True),
        ("{'n': 2}", False),
        ("{'regex': 'a+'}", False),
    ],
)
async def test_sampling_that_the_engine_is_not_asked_with_is_an_error(answer: Any, given: str, allowed: bool) -> None:
    text = (
        "from slime.rollout.sglang_rollout import generate\n"
        "async def f(args, sample, sampling_params):\n"
        f"    sampling_params.update({given})\n"
        "    try:\n        made = await generate(args, sample, sampling_params)\n"
        f"        assert {allowed}\n        return made\n"
        "    except Exception as error:\n"
        f"        assert not {allowed} and 'the engine is not asked that way here' in str(error)\n"
        "    for name in ('n', 'regex'):\n        sampling_params.pop(name, None)\n"
        "    return await generate(args, sample, sampling_params)\n"
    )
    engine = ScriptedEngine()
    (batch,) = await answer(text, engine=engine)
    assert len(batch.samples) == 12
    if "seed" in given:
        assert {request.params.seed for request in engine.requests} == {11}


async def test_a_tokenizer_of_the_run_is_what_load_tokenizer_returns(make_run: Callable[..., Any]) -> None:
    from rollfeed.compat.slime_plugins.names.helpers import load_tokenizer

    run = make_run()
    run.tokenizer = CharTokenizer()
    vars(run.args)["hf_checkpoint"] = "mine"
    assert load_tokenizer("mine", trust_remote_code=True).encode("ab") == [97, 98]
