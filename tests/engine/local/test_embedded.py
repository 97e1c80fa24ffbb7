"""The engine's behaviour, on a tiny random model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from rollfeed.base.cores import num_physical_cores
from rollfeed.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    EngineProtocolError,
    EngineUnavailableError,
)
from rollfeed.protocols import Engine
from rollfeed.testing.prompts import CharTokenizer
from rollfeed.types import Completion, EngineLoad, FinishKind, FinishReason, SamplingParams, TensorUpdate

MakeEngine = Callable[..., Engine]
PROMPT = np.array([72, 101, 108, 108, 111], np.int32)


class NoEndTokenizer(CharTokenizer):
    """No id ends a response, so that a response is as long as asked for."""

    eos_token_ids: tuple[int, ...] = ()


@pytest.fixture
def endless(save_tiny: Callable[[Any], Path], make_tiny_engine: MakeEngine) -> MakeEngine:
    """Engines whose requests end only by length, stop strings or abort."""
    import transformers

    folder = save_tiny(
        transformers.LlamaConfig(
            vocab_size=128,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=100_000,
            bos_token_id=None,
            eos_token_id=None,
        )
    )

    def make(**changes: Any) -> Engine:
        return make_tiny_engine(**{"checkpoint": folder, "tokenizer": NoEndTokenizer(), **changes})

    return make


def params(max_new_tokens: int, **changes: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, **{"seed": 0, **changes})


async def until_running(engine: Engine, running: int, waiting: int = 0) -> None:
    while await engine.load() != EngineLoad(running, waiting):
        await engine.abort("nobody")  # takes one step of the engine


async def test_one_seed_gives_one_response_and_another_seed_another(endless: MakeEngine) -> None:
    async with endless() as engine:
        first, again, other = [
            await engine.generate(PROMPT, params(20, seed=seed), request_id="r") for seed in (1, 1, 2)
        ]
    assert first.token_ids.tolist() == again.token_ids.tolist()
    assert first.token_ids.tolist() != other.token_ids.tolist()


async def test_a_completion_says_what_happened(endless: MakeEngine) -> None:
    async with endless() as engine:
        first = await engine.generate(PROMPT, params(6), request_id="a")
        second = await engine.generate(PROMPT, params(6, seed=9), request_id="b")
    assert first.finish_reason == FinishReason(FinishKind.LENGTH)
    assert first.text == "".join(map(chr, first.token_ids))
    assert (first.prompt_tokens, first.cached_tokens, first.precision) == (5, 0, "fp32")
    assert second.cached_tokens == 4
    assert first.version_spans == ((0, 6, 0),)
    assert 0 <= first.timings.queue_seconds <= first.timings.total_seconds
    assert (first.token_ids.dtype, first.logprobs.dtype) == (np.int32, np.float32)


async def test_samples_of_a_prompt_share_one_prefill(endless: MakeEngine) -> None:
    async with endless() as engine:
        completions = await asyncio.gather(
            *(engine.generate(PROMPT, params(3, seed=seed), request_id="r") for seed in range(4))
        )
    assert sorted(completion.cached_tokens for completion in completions) == [0, 4, 4, 4]


async def test_more_requests_than_slots_are_all_answered_in_order_of_arrival(endless: MakeEngine) -> None:
    finished: list[int] = []
    async with endless(num_slots=2) as engine:

        async def ask(number: int) -> None:
            completion = await engine.generate(PROMPT, params(5, seed=number), request_id=str(number))
            assert len(completion.token_ids) == 5
            finished.append(number)

        await asyncio.gather(*(ask(number) for number in range(9)))
    assert finished == list(range(9))


async def test_load_counts_running_and_waiting_requests(endless: MakeEngine) -> None:
    async with endless(num_slots=2, context_length=50_000) as engine:
        tasks = [asyncio.create_task(engine.generate(PROMPT, params(40_000), request_id="r")) for _ in range(5)]
        await until_running(engine, 2, 3)
        await engine.abort()
        await asyncio.gather(*tasks)
        assert await engine.load() == EngineLoad(0, 0)


async def test_abort_of_one_request_returns_what_it_has(endless: MakeEngine) -> None:
    async with endless(context_length=50_000) as engine:
        kept = asyncio.create_task(engine.generate(PROMPT, params(300), request_id="kept"))
        aborted = asyncio.create_task(engine.generate(PROMPT, params(40_000), request_id="aborted"))
        await kept
        await engine.abort("aborted")
        await engine.abort("unknown")
        completion = await aborted
    assert completion.finish_reason == FinishReason(FinishKind.ABORT)
    assert len(completion.token_ids) >= 290
    assert len(completion.text) == len(completion.logprobs) == len(completion.token_ids)
    assert kept.result().finish_reason.kind is FinishKind.LENGTH


async def test_abort_of_all_reaches_waiting_requests_too(endless: MakeEngine) -> None:
    async with endless(num_slots=1, context_length=50_000) as engine:
        tasks = [asyncio.create_task(engine.generate(PROMPT, params(40_000), request_id=str(n))) for n in range(3)]
        await until_running(engine, 1, 2)
        await engine.abort()
        completions = await asyncio.gather(*tasks)
        assert all(completion.finish_reason.kind is FinishKind.ABORT for completion in completions)
        assert [len(completion.token_ids) for completion in completions[1:]] == [0, 0]
        assert completions[1].version_spans == ()
        after = await engine.generate(PROMPT, params(2), request_id="after")
    assert len(after.token_ids) == 2


async def test_a_cancelled_caller_frees_its_slot(endless: MakeEngine) -> None:
    async with endless(num_slots=1, context_length=50_000) as engine:
        task = asyncio.create_task(engine.generate(PROMPT, params(40_000), request_id="r"))
        await until_running(engine, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        completion = await engine.generate(PROMPT, params(3), request_id="next")
    assert len(completion.token_ids) == 3


async def test_an_aborted_request_goes_on_from_its_own_tokens(endless: MakeEngine) -> None:
    async with endless(context_length=50_000) as engine:
        task = asyncio.create_task(engine.generate(PROMPT, params(40_000), request_id="r"))
        await asyncio.sleep(0)  # submitted before the other, which then ends after its first token
        await engine.generate(PROMPT, params(30), request_id="other")
        await engine.abort("r")
        partial = await task
        resumed_prompt = np.concatenate([PROMPT, partial.token_ids])
        resumed = await engine.generate(resumed_prompt, params(5), request_id="r")
    assert resumed.cached_tokens == len(resumed_prompt) - 1


async def test_pause_holds_requests_and_resume_continues_them(endless: MakeEngine) -> None:
    async with endless() as engine:
        expected = await engine.generate(PROMPT, params(20), request_id="r")
        await engine.pause()
        task = asyncio.create_task(engine.generate(PROMPT, params(20), request_id="r"))
        await engine.abort("somebody else")  # the engine has seen the request when this returns
        assert not task.done()
        await engine.resume()
        completion = await task
    assert completion.token_ids.tolist() == expected.token_ids.tolist()


async def test_abort_and_close_work_while_paused(endless: MakeEngine) -> None:
    async with endless() as engine:
        await engine.pause()
        first = asyncio.create_task(engine.generate(PROMPT, params(20), request_id="first"))
        second = asyncio.create_task(engine.generate(PROMPT, params(20), request_id="second"))
        await asyncio.sleep(0)
        await engine.abort("first")
        assert (await first).finish_reason.kind is FinishKind.ABORT
    with pytest.raises(EngineUnavailableError):
        await second


async def test_stop_strings_end_a_response(endless: MakeEngine) -> None:
    async with endless() as engine:
        free = await engine.generate(PROMPT, params(30, min_new_tokens=1), request_id="r")
        stop = free.text[10:13]
        end = free.text.index(stop) + len(stop)
        stopped = await engine.generate(PROMPT, params(30, stop=(stop,)), request_id="r")
        later = await engine.generate(PROMPT, params(30, stop=(stop,), min_new_tokens=end + 1), request_id="r")
    assert stopped.finish_reason == FinishReason(FinishKind.STOP, stop)
    assert stopped.text == free.text[:end]
    assert len(later.token_ids) > end


async def test_stop_token_ids_end_a_response_but_not_before_min_new_tokens(endless: MakeEngine) -> None:
    async with endless() as engine:
        free = await engine.generate(PROMPT, params(30), request_id="r")
        token = int(free.token_ids[5])
        stopped = await engine.generate(PROMPT, params(30, stop_token_ids=(token,)), request_id="r")
        held = await engine.generate(PROMPT, params(12, stop_token_ids=(token,), min_new_tokens=12), request_id="r")
    assert stopped.finish_reason == FinishReason(FinishKind.STOP, token)
    assert stopped.token_ids[-1] == token
    assert len(held.token_ids) == 12
    assert token not in held.token_ids


async def test_asking_for_no_tokens_gives_none(endless: MakeEngine) -> None:
    async with endless(context_length=10) as engine:
        nothing = await engine.generate(PROMPT, params(0), request_id="r")
        full = await engine.generate(np.resize(PROMPT, 10), params(5), request_id="r")
        rest = await engine.generate(np.resize(PROMPT, 8), params(5), request_id="r")
    assert (len(nothing.token_ids), nothing.finish_reason) == (0, FinishReason(FinishKind.LENGTH))
    assert (len(full.token_ids), full.finish_reason) == (0, FinishReason(FinishKind.LENGTH))
    assert (len(rest.token_ids), rest.finish_reason) == (2, FinishReason(FinishKind.LENGTH))


@pytest.mark.parametrize(
    ("prompt", "images", "message"),
    [
        (np.resize(PROMPT, 300), (), "The input (300 tokens) is longer than the model's context length (256 tokens)."),
        (np.zeros(0, np.int32), (), "the input has no tokens"),
        (np.array([5, 128], np.int32), (), "outside the model's vocabulary of 128"),
        (np.array([-1], np.int32), (), "outside the model's vocabulary of 128"),
        (PROMPT, ("picture.png",), "text only"),
    ],
)
async def test_a_request_that_can_never_be_served_is_refused(
    endless: MakeEngine, prompt: NDArray[np.int32], images: Sequence[str], message: str
) -> None:
    async with endless() as engine:
        with pytest.raises(EngineProtocolError) as caught:
            await engine.generate(prompt, params(5), request_id="r", images=images)
    assert message in str(caught.value)


async def test_a_weight_update_in_flight_shows_in_the_version_spans(endless: MakeEngine) -> None:
    async with endless(context_length=50_000) as engine:
        task = asyncio.create_task(engine.generate(PROMPT, params(40_000), request_id="r"))
        await asyncio.sleep(0)  # submitted before the other, which then ends after its first token
        await engine.generate(PROMPT, params(5), request_id="other")
        await engine.apply(TensorUpdate({"model.norm.weight": np.full(48, 0.5, np.float32)}, policy_version=7))
        assert engine.policy_version == 7
        after = await engine.generate(PROMPT, params(5), request_id="other")
        await engine.abort("r")
        completion = await task
    assert [span.policy_version for span in completion.version_spans] == [0, 7]
    assert completion.version_spans[-1].end == len(completion.token_ids)
    assert [span.policy_version for span in after.version_spans] == [7]
    assert after.cached_tokens == 0


async def test_a_weight_update_before_the_first_token_starts_the_prompt_again(endless: MakeEngine) -> None:
    update = {"model.embed_tokens.weight": torch.full((128, 48), 0.1).cumsum(dim=0)}
    async with endless() as engine:
        await engine.apply(TensorUpdate(update, policy_version=1))
        expected = await engine.generate(PROMPT, params(8), request_id="r")
    async with endless() as engine:
        warm = await engine.generate(PROMPT, params(8), request_id="r")
        await engine.pause()
        task = asyncio.create_task(engine.generate(PROMPT, params(8), request_id="r"))
        await engine.abort("somebody else")
        await engine.apply(TensorUpdate(update, policy_version=1))
        await engine.resume()
        completion = await task
    assert completion.logprobs.tolist() == expected.logprobs.tolist()
    assert completion.logprobs.tolist() != warm.logprobs.tolist()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"model.norm.weight": np.ones(48, np.float32), "nonsense": np.ones(3, np.float32)}, "'nonsense'"),
        ({"model.norm.weight": np.ones(47, np.float32)}, "its shape is (47,), the model's (48,)"),
        ({"model.norm.weight": np.full(48, np.nan, np.float32)}, "not finite"),
        (
            {
                "model.norm.weight": np.ones(48, np.float32),
                "model.layers.1.mlp.up_proj.weight": torch.full((80, 48), torch.inf),
            },
            "not finite",
        ),
        ({"model.norm.weight": np.ones(48, np.int64)}, "floating point"),
        ({"model.norm.weight": torch.ones(48, dtype=torch.int32)}, "floating point"),
        ({"model.norm.weight": [1.0] * 48}, "neither a torch tensor nor a numpy array"),
        ({"model.norm.weight": torch.ones(48).to(torch.float8_e4m3fn)}, "float8_e4m3fn, not floating point"),
        ({"model.norm.weight": torch.ones(48, dtype=torch.complex64)}, "complex64, not floating point"),
        ({"model.norm.weight": np.full(48, 1e300)}, "not finite as torch.float32"),
    ],
)
async def test_a_bad_weight_update_changes_nothing(endless: MakeEngine, tensors: dict[str, Any], message: str) -> None:
    async with endless() as engine:
        before = await engine.generate(PROMPT, params(8), request_id="r")
        with pytest.raises(EngineProtocolError) as caught:
            await engine.apply(TensorUpdate(tensors, policy_version=1))
        after = await engine.generate(PROMPT, params(8), request_id="r")
        assert engine.policy_version == 0
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert after.logprobs.tolist() == before.logprobs.tolist()


async def test_tokens_decoded_on_keys_and_values_of_older_weights_are_counted(endless: MakeEngine) -> None:
    async with endless() as engine:
        await engine.generate(PROMPT, SamplingParams(max_new_tokens=5), request_id="before")
        assert engine.metrics()["stale_cache_share"] == 0.0
        task = asyncio.create_task(engine.generate(PROMPT, SamplingParams(max_new_tokens=60), request_id="through"))
        while not (engine.num_running or task.done()):  # noqa: ASYNC110 - its thread sets no event
            await asyncio.sleep(0.001)
        await engine.apply(TensorUpdate({}, policy_version=1))
        completion = await task
        stale = len(completion.token_ids) - completion.version_spans[0].end
        told = engine.metrics()
        assert told["stale_cache_tokens"] == stale
        assert told["stale_cache_share"] == stale / (5 + len(completion.token_ids))
        assert (stale > 0) == (len(completion.version_spans) > 1)


async def test_weights_may_come_as_read_only_arrays_and_in_other_precisions(endless: MakeEngine) -> None:
    array = np.full(48, 0.5, np.float64)
    array.flags.writeable = False
    results = []
    for value in (array, torch.full((48,), 0.5, dtype=torch.bfloat16), np.full(48, 0.5, np.dtype(">f4"))):
        async with endless() as engine:
            await engine.apply(TensorUpdate({"model.norm.weight": value}, policy_version=1))
            results.append((await engine.generate(PROMPT, params(6), request_id="r")).logprobs.tolist())
    assert results[0] == results[1] == results[2]


async def test_a_model_whose_output_is_not_finite_fails_its_requests_and_recovers(endless: MakeEngine) -> None:
    async with endless(num_slots=1) as engine:
        expected = await engine.generate(PROMPT, params(6), request_id="r")
        good = np.full(48, 1.0, np.float32)
        await engine.apply(TensorUpdate({"model.layers.0.input_layernorm.weight": good}, policy_version=1))
        expected = await engine.generate(PROMPT, params(6), request_id="r")
        await engine.apply(TensorUpdate({"model.layers.0.input_layernorm.weight": good * 3e38}, policy_version=2))
        with pytest.raises(EngineError, match=r"r: the model's output is not finite \(policy version 2\)"):
            await engine.generate(PROMPT, params(6), request_id="r")
        await engine.apply(TensorUpdate({"model.layers.0.input_layernorm.weight": good}, policy_version=3))
        again = await engine.generate(PROMPT, params(6), request_id="r")
    assert again.logprobs.tolist() == expected.logprobs.tolist()


class FailingTokenizer(NoEndTokenizer):
    """Fails as soon as text is asked for."""

    def decode(self, token_ids: Sequence[int] | NDArray[np.int32], *, skip_special_tokens: bool) -> str:
        raise RuntimeError("the tokenizer broke")


async def test_a_tokenizer_that_fails_fails_each_request_with_the_cause_and_nothing_else(endless: MakeEngine) -> None:
    async with endless(tokenizer=FailingTokenizer(), num_slots=2) as engine:
        tasks = [engine.generate(PROMPT, params(200, stop=("x",)), request_id=str(n)) for n in range(4)]
        tasks.append(engine.generate(PROMPT, params(3), request_id="short"))
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), timeout=60)
        assert len(results) == 5
        for error in results:
            assert isinstance(error, EngineError)
            assert "RuntimeError: the tokenizer broke" in str(error)
            assert isinstance(error.__cause__, RuntimeError)
        await engine.health()
        assert await engine.load() == EngineLoad(0, 0)


@pytest.mark.parametrize("kernels", ["native", "torch"])
async def test_a_request_that_cannot_be_let_in_fails_alone(endless: MakeEngine, kernels: str) -> None:
    async with endless(kernels=kernels, num_slots=2) as engine:
        asked = [params(4), params(4, min_new_tokens=2**63), params(4), params(4, min_new_tokens=2**64)]
        answers = await asyncio.gather(
            *(engine.generate(PROMPT, each, request_id=str(index)) for index, each in enumerate(asked)),
            return_exceptions=True,
        )
        assert [isinstance(answer, EngineError) for answer in answers] == [False, True, False, True]
        assert "request 1: OverflowError" in str(answers[1])
        assert await engine.load() == EngineLoad(0, 0)
        assert len((await engine.generate(PROMPT, params(4), request_id="later")).token_ids) == 4


async def test_an_update_that_fails_fails_alone(endless: MakeEngine) -> None:
    async with endless() as engine:
        with pytest.raises(EngineError, match="a command of the engine failed: TypeError"):
            await engine.apply(TensorUpdate({"model.norm.weight": np.ones(48, np.longdouble)}, policy_version=1))
        await engine.generate(PROMPT, params(2), request_id="later")


async def test_leaving_ends_the_thread_and_fails_what_is_pending(endless: MakeEngine) -> None:
    async with endless(num_slots=1, context_length=50_000) as engine:
        tasks = [asyncio.create_task(engine.generate(PROMPT, params(40_000), request_id="r")) for _ in range(2)]
        await until_running(engine, 1, 1)
        await engine.health()
    for task in tasks:
        with pytest.raises(EngineUnavailableError, match="closed"):
            await task
    for use in (engine.generate(PROMPT, params(3), request_id="r"), engine.health(), engine.abort(), engine.pause()):
        with pytest.raises(EngineUnavailableError, match="closed"):
            await use
    await asyncio.to_thread(engine._thread._thread.join, 60.0)  # leaving waits for it a second at most
    assert not engine._thread._thread.is_alive()


async def test_an_engine_that_was_not_entered_is_unavailable(endless: MakeEngine) -> None:
    engine = endless()
    for use in (engine.generate(PROMPT, params(3), request_id="r"), engine.health(), engine.pause()):
        with pytest.raises(EngineUnavailableError, match="async with"):
            await use


async def test_weights_that_do_not_fit_the_configuration_are_a_checkpoint_error(
    tiny_llama: Path, tmp_path: Path, make_tiny_engine: MakeEngine
) -> None:
    config = (tiny_llama / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"intermediate_size": 80', '"intermediate_size": 81'))
    (tmp_path / "model.safetensors").write_bytes((tiny_llama / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"its shape is \(\d+, \d+\), the model's"):
        async with make_tiny_engine(checkpoint=tmp_path):
            pass
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        async with make_tiny_engine(checkpoint=tmp_path):
            pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_length": 2048}, "context_length = 2048: the model in .* allows at most 1024"),
        ({"context_length": 1}, "context_length = 1"),
        ({"num_slots": 0}, "num_slots = 0"),
        ({"threads": -1}, "threads = -1"),
    ],
)
def test_settings_out_of_range_are_refused_before_anything_starts(
    make_tiny_engine: MakeEngine, changes: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_tiny_engine(**changes)


async def test_random_use_answers_every_request_exactly_once(endless: MakeEngine) -> None:
    random = np.random.default_rng(3)
    async with endless(num_slots=3) as engine:

        async def ask(number: int) -> Completion | None:
            prompt = np.resize(PROMPT, int(random.integers(1, 40)))
            wanted = int(random.integers(0, 30))
            task = asyncio.create_task(engine.generate(prompt, params(wanted, seed=number), request_id=str(number)))
            for _ in range(int(random.integers(0, 200))):
                await asyncio.sleep(0)
            action = random.integers(0, 6)
            if action == 0:
                task.cancel()
            elif action == 1:
                await engine.abort(str(number))
            elif action == 2:
                await engine.pause()
                await engine.resume()
            elif action == 3:
                await engine.apply(TensorUpdate({"model.norm.weight": np.ones(48, np.float32)}, policy_version=number))
            try:
                completion = await task
            except asyncio.CancelledError:
                return None
            assert completion.finish_reason.kind is FinishKind.ABORT or len(completion.token_ids) == wanted
            return completion

        results = await asyncio.wait_for(asyncio.gather(*(ask(number) for number in range(150))), timeout=120)
        assert await engine.load() == EngineLoad(0, 0)
    assert sum(result is not None for result in results) > 75


def test_other_architectures_fall_back_to_transformers_with_a_warning(
    save_tiny: Callable[[Any], Path], make_tiny_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    import transformers

    folder = save_tiny(transformers.GPT2Config(vocab_size=128, n_positions=64, n_embd=16, n_layer=1, n_head=2))
    with caplog.at_level(logging.WARNING):
        engine = make_tiny_engine(checkpoint=folder, context_length=64)
    assert "through transformers" in caplog.text
    assert engine.context_length == 64


def test_completions_carry_the_precision_they_were_computed_in(
    save_tiny: Callable[[Any], Path], make_tiny_engine: Callable[..., Engine]
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}
    folder = save_tiny(transformers.LlamaConfig(vocab_size=128, bos_token_id=None, eos_token_id=3, **sizes))

    async def main() -> list[Completion]:
        found = []
        for precision in ("fp32", "int8"):
            async with make_tiny_engine(checkpoint=folder, precision=precision) as engine:
                params = SamplingParams(max_new_tokens=5, temperature=0.0, min_new_tokens=5)
                found.append(await engine.generate(np.arange(10, dtype=np.int32), params, request_id="r"))
        return found

    exact, quantised = asyncio.run(main())
    assert (exact.precision, quantised.precision) == ("fp32", "int8")
    np.testing.assert_allclose(quantised.logprobs[0], exact.logprobs[0], atol=0.3)
    assert quantised.logprobs[0] != exact.logprobs[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"precision": "int8", "kernels": "torch"}, "needs the native kernels"),
        ({"precision": "bf16"}, "computes in fp32 or int8 on cpu"),
        ({"precision": "int8"}, "has 48 inputs, which is not a multiple of 32"),
    ],
)
def test_a_precision_that_cannot_be_had_is_refused(
    changes: dict[str, str], words: str, make_tiny_engine: Callable[..., Engine]
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_tiny_engine(**changes)


def test_the_number_of_threads_is_chosen_by_measurement(make_tiny_engine: Callable[..., Engine]) -> None:
    async def main() -> int:
        async with make_tiny_engine(threads=0) as engine:
            await engine.generate(np.arange(5, dtype=np.int32), SamplingParams(max_new_tokens=2), request_id="r")
            return engine.threads

    assert 1 <= asyncio.run(main()) <= num_physical_cores()
