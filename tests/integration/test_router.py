"""``rollfeed serve router`` in a process, over servers of the embedded engine and over fake ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import urllib.error
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.held_ports import held_port
from tests.integration.routed_processes import (
    RouterProcess,
    Worker,
    ask,
    generate,
    healthy_workers,
)
from tests.integration.slime_caller import SIZE, Source, arguments, eval_set

from rollfeed.app.inside_slime import slime_process
from rollfeed.cli.main import main
from rollfeed.compat.slime_rollout import generate_rollout
from rollfeed.config import SGLangSettings
from rollfeed.engine.client import ServerEngine
from rollfeed.engine.dialects import SGLang
from rollfeed.testing import CharTokenizer
from rollfeed.testing.fake_sglang import start_fake_sglang
from rollfeed.types import FinishKind, SamplingParams, TensorUpdate
from rollfeed.weights import DiskTransport


@pytest.fixture(scope="module")
def workers(tiny_checkpoint: Path) -> Iterator[list[str]]:
    with contextlib.ExitStack() as stack:
        started = [Worker(tiny_checkpoint) for _ in range(2)]
        for worker in started:
            stack.callback(worker.end)
        yield [worker.address() for worker in started]


@pytest.fixture(scope="module")
def router(workers: list[str], tiny_checkpoint: Path) -> Iterator[str]:
    process = RouterProcess(
        *workers, "--probe-timeout-seconds", "60", "--span-cache", "100000", "--tokenizer", str(tiny_checkpoint)
    )
    try:
        yield process.address()
    finally:
        assert "Traceback" not in process.end()
        assert process.process.returncode == 0


def test_embedded_servers_answer_in_every_form_that_they_have(router: str, workers: list[str]) -> None:
    assert healthy_workers(router) == set(workers)
    assert {each["kind"] for each in json.loads(ask(router, "/workers"))["workers"]} == {"sglang"}
    sampling = {"max_new_tokens": 5, "ignore_eos": True}
    assert len(generate(router, input_ids=[72, 101], sampling_params=sampling)["output_ids"]) == 5
    streamed = ask(router, "/generate", {"input_ids": [72], "sampling_params": sampling, "stream": True})
    assert streamed.endswith("data: [DONE]\n\n")
    said = {"role": "user", "content": "Hi"}
    chat = json.loads(ask(router, "/v1/chat/completions", {"model": "tiny", "messages": [said], "max_tokens": 4}))
    assert chat["choices"][0]["message"]["role"] == "assistant"
    body = {"model": "tiny", "messages": [said], "max_tokens": 4, "stream": True}
    assert ask(router, "/v1/messages", body).rstrip().endswith("}")
    assert json.loads(ask(router, "/v1/models"))["data"][0]["id"] == "tiny"
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(router, "/inference/v1/generate", {"token_ids": [1]})
    with refused.value:
        assert refused.value.code == 404
        assert "of kind sglang" in refused.value.read().decode()


def test_text_that_was_sampled_has_its_tokens_again(router: str) -> None:
    sampling = {"max_new_tokens": 6, "ignore_eos": True}
    first = json.loads(ask(router, "/generate", {"text": "Count: ", "sampling_params": sampling}))
    assert "output_token_logprobs" not in first["meta_info"], "nobody has asked for it"
    text = "Count: " + first["text"]
    found = json.loads(ask(router, "/retrieve_from_text", {"text": text}))
    assert found["tokens"][-6:] == first["output_ids"]
    assert found["loss_mask"][-6:] == [1] * 6
    more = {"text": text + " Go on. ", "sampling_params": sampling, "stream": True}
    second = json.loads(ask(router, "/generate", more).split("\n\n")[0].removeprefix("data: "))
    assert second["meta_info"]["prompt_tokens"] > len(found["tokens"])
    with pytest.raises(urllib.error.HTTPError) as unknown:
        ask(router, "/retrieve_from_text", {"text": "never seen"})
    with unknown.value:
        assert unknown.value.code == 404


def test_check_asks_a_router_and_its_servers(
    router: str, workers: list[str], settings_file: Callable[..., Path], rollfeed: Callable[..., Any]
) -> None:
    ran = rollfeed("check", settings_file(), "--json", "--servers", "--set", f"engine.sglang.router={router}")
    assert ran.code == 0, ran.err
    assert sorted(each["address"] for each in ran.json["servers"]) == sorted(workers)


async def test_a_router_that_is_killed_and_started_again_loses_nothing_of_a_client(tmp_path: Path) -> None:
    model = {"num_slots": 8, "median_length": 60.0, "max_length": 100}
    fake = start_fake_sglang(mode="time-model", num_workers=2, time_model=model)
    async with fake as fakes, contextlib.AsyncExitStack() as stack:
        patience = ("--probe-timeout-seconds", "60")
        port = stack.enter_context(held_port())
        first = await asyncio.to_thread(RouterProcess, *fakes.addresses, *patience, port=port)
        stack.callback(first.end)
        address = await asyncio.to_thread(first.address)
        settings = SGLangSettings(router=address, concurrency=64, probe_interval_seconds=0.3, max_tries=1000)
        async with ServerEngine(
            SGLang(settings), context_length=4096, tokenizer=CharTokenizer(), transport=DiskTransport(tmp_path)
        ) as engine:
            prompt, params = np.arange(10, dtype=np.int32), SamplingParams(max_new_tokens=100)
            asked = [
                asyncio.create_task(engine.generate(prompt + number, params, request_id=f"r{number}"))
                for number in range(40)
            ]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            first.process.send_signal(signal.SIGKILL)
            await asyncio.to_thread(first.process.wait)
            again = await asyncio.to_thread(RouterProcess, *fakes.addresses, *patience, port=port)
            stack.callback(again.end)
            assert await asyncio.to_thread(again.address) == address
            completions = await asyncio.gather(*asked)
            assert FinishKind.ABORT not in {each.finish_reason.kind for each in completions}
            assert all(len(each.token_ids) == len(each.logprobs) > 0 for each in completions)
            # Weights that this client publishes go to the workers, and the router follows.
            await engine.apply(TensorUpdate({"w": np.zeros(3, np.float32)}, policy_version=1))
            late = await engine.generate(prompt, params, request_id="late")
            assert {span.policy_version for span in late.version_spans} == {1}
            running = asyncio.create_task(engine.generate(prompt, params, request_id="aborted"))
            await engine.abort("aborted")
            await running


@pytest.fixture
def slime_source() -> Iterator[Source]:
    yield Source()
    slime_process.end()


def test_slimes_process_makes_steps_with_aborts_and_weights_through_the_router(
    router: str, tiny_checkpoint: Path, tmp_path: Path, slime_source: Source
) -> None:
    sets = [eval_set(tmp_path / "numbers.jsonl", min_new_tokens=4)]
    args = arguments(router, tiny_checkpoint, partial_rollout=True, eval_datasets=sets)
    trained: list[int] = []
    for step in count():
        if step == 2:
            body = {"model_path": str(tiny_checkpoint), "weight_version": "3", "abort_all_requests": True}
            assert json.loads(ask(router, "/update_weights_from_disk", body))["success"]
        output = generate_rollout(args, step, slime_source)
        assert [len(group) for group in output.samples] == [SIZE] * 3
        samples: list[Any] = [sample for group in output.samples for sample in group]
        assert all(each.response_length == len(each.rollout_log_probs) for each in samples)
        trained += [group[0].group_index for group in output.samples]
        # A step may have nothing but groups that were finished before it.
        if step >= 2 and any(sample.weight_versions[-1] == "3" for sample in samples):
            break
    waiting = [group[0].group_index for group in slime_source.buffer]
    assert sorted(trained + waiting) == list(range(slime_source.num_drawn))
    result = generate_rollout(args, step + 1, slime_source, evaluation=True)
    assert len(result.data["numbers"]["rewards"]) == 6


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (("--port", "70000"), "--port 70000"),
        (("10.0.0.5:30000",), "10.0.0.5:30000: no address of a worker"),
        (("--max-tries", "0"), "--max-tries 0: must be above 0"),
        (("--span-cache", "100"), "give both, or neither"),
        (("--span-cache-versions", "3"), "there is no cache"),
        (("--span-cache", "100", "--span-cache-versions", "-1", "--tokenizer", "x"), "must be at least 0"),
        (("--api-key-env", "NOT_SET_ANYWHERE"), "--api-key-env"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(
    capfd: pytest.CaptureFixture[str], options: tuple[str, ...], cause: str
) -> None:
    assert main(["serve", "router", *options]) == 2
    err = capfd.readouterr().err
    assert cause in err
    assert len(err.splitlines()) == 1
