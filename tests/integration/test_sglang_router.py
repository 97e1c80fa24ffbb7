"""The real ``sglang-router``, from a virtual environment of its own, over servers of the embedded engine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.held_ports import held_port
from tests.integration.routed_processes import (
    Worker,
    ask,
    environment,
    generate,
    healthy_workers,
    num_ended,
    until,
)
from tests.integration.slime_caller import SIZE, Source, arguments, eval_set

from rollfeed.app.inside_slime import slime_process
from rollfeed.compat.slime_rollout import generate_rollout
from rollfeed.testing.fake_sglang import start_fake_sglang

OWN_ENVIRONMENT = Path(__file__).parents[2] / ".venv-router"


def router_python() -> str:
    """The Python that has the wheel; without one there is nothing to test."""
    named = os.environ.get("ROLLFEED_ROUTER_PYTHON")
    if named:
        return named
    if not OWN_ENVIRONMENT.exists():
        pytest.skip("no sglang-router: `make install` makes .venv-router, ROLLFEED_ROUTER_PYTHON names another one")
    return str(OWN_ENVIRONMENT / "bin" / "python")


def events(text: str) -> list[Any]:
    *pieces, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(piece.removeprefix("data: ")) for piece in pieces]


@contextlib.contextmanager
def running_router(workers: Sequence[str], log: Path) -> Iterator[str]:
    with (
        held_port() as port,
        held_port() as metrics_port,
        started_router(workers, log, port, metrics_port) as process,
    ):

        def has_all() -> bool:
            assert process.poll() is None, log.read_text()
            return healthy_workers(f"http://127.0.0.1:{port}") == set(workers)

        until(has_all)
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def started_router(
    workers: Sequence[str], log: Path, port: int, metrics_port: int
) -> Iterator[subprocess.Popen[bytes]]:
    options = ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", *workers, "--policy", "round_robin"]
    options += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    options += ["--health-check-interval-secs", "1", "--health-failure-threshold", "1"]
    options += ["--health-check-timeout-secs", "60"]  # one that is slow is not one that is lost
    with log.open("w") as file:
        process = subprocess.Popen(
            [router_python(), "-m", "sglang_router.launch_router", *options],
            env=environment(),
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def workers(tiny_checkpoint: Path) -> Iterator[list[str]]:
    router_python()
    logged: list[str] = []
    with contextlib.ExitStack() as stack:
        started = [Worker(tiny_checkpoint) for _ in range(2)]
        for worker in started:
            stack.callback(lambda each: logged.append(each.end()), worker)
        yield [worker.address() for worker in started]
    assert logged == ["", ""]


@pytest.fixture(scope="module")
def router(workers: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_router(workers, tmp_path_factory.mktemp("router") / "log.txt") as address:
        yield address


@pytest.mark.skipif(not OWN_ENVIRONMENT.exists(), reason="`make install` has not made .venv-router")
def test_the_environment_that_was_installed_for_it_has_the_pinned_router() -> None:
    code = "from sglang_router.launch_router import Router; from sglang_router import __version__; print(__version__)"
    command = [OWN_ENVIRONMENT / "bin" / "python", "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    pinned = (OWN_ENVIRONMENT.parent / "constraints-router.txt").read_text().splitlines()
    assert f"sglang-router=={found.stdout.strip()}" in pinned


def test_both_workers_are_listed_as_what_they_serve(router: str, workers: list[str], tiny_checkpoint: Path) -> None:
    listed = json.loads(ask(router, "/workers"))["workers"]
    assert {worker["url"] for worker in listed} == set(workers)
    for worker in listed:
        assert worker["is_healthy"]
        assert worker["model_id"] == "tiny"
        assert worker["metadata"]["model_path"] == str(tiny_checkpoint)


def test_tokens_and_logprobs_come_back_intact_and_from_both_workers(router: str, workers: list[str]) -> None:
    body = {
        "input_ids": [72, 101, 108],
        "sampling_params": {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0.7, "sampling_seed": 5},
        "logprob_start_len": 0,
    }
    direct = generate(workers[0], rid="one", **body)
    before = [num_ended(worker) for worker in workers]
    for _ in range(4):
        routed = generate(router, rid="one", **body)
        assert routed["output_ids"] == direct["output_ids"]
        assert routed["text"] == direct["text"]
        assert routed["meta_info"].keys() == direct["meta_info"].keys()
        for name in ("id", "finish_reason", "prompt_tokens", "completion_tokens", "weight_version"):
            assert routed["meta_info"][name] == direct["meta_info"][name]
        for name in ("input_token_logprobs", "output_token_logprobs"):
            assert [entry[1:] for entry in routed["meta_info"][name]] == [
                entry[1:] for entry in direct["meta_info"][name]
            ]
            logprobs, expected = (
                [entry[0] for entry in reply["meta_info"][name] if entry[0] is not None] for reply in (routed, direct)
            )
            assert logprobs == pytest.approx(expected, abs=1e-4)
    assert [num_ended(worker) - count for worker, count in zip(workers, before, strict=True)] == [2, 2]


def test_all_forms_of_a_request_pass_through(router: str) -> None:
    sampling = {"max_new_tokens": 5, "ignore_eos": True}
    batch = generate(router, input_ids=[[72, 101], [80]], sampling_params=sampling)
    assert [len(reply["output_ids"]) for reply in batch] == [5, 5]
    assert [reply["meta_info"]["prompt_tokens"] for reply in batch] == [2, 1]
    samples = generate(router, input_ids=[72], rid="several", sampling_params={**sampling, "n": 3})
    assert [reply["meta_info"]["id"] for reply in samples] == ["several_0", "several_1", "several_2"]
    assert len(generate(router, text="hello", sampling_params=sampling)["output_ids"]) == 5
    scored = generate(router, input_ids=[72, 101], logprob_start_len=0, sampling_params={"max_new_tokens": 0})
    assert [entry[1] for entry in scored["meta_info"]["input_token_logprobs"]] == [72, 101]


def test_streams_pass_through(router: str) -> None:
    body = {"input_ids": [72, 101], "stream": True, "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
    replies = events(ask(router, "/generate", {**body, "return_logprob": True}))
    lengths = [len(reply["output_ids"]) for reply in replies]
    assert lengths == sorted(lengths)
    assert lengths[-1] == replies[-1]["meta_info"]["output_token_logprobs_length"] == 8
    assert replies[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 8}


def test_chats_pass_through_whole_and_streamed(router: str) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "seed": 3}
    body["ignore_eos"] = True
    reply = json.loads(ask(router, "/v1/chat/completions", body))
    assert reply["usage"]["completion_tokens"] == 6
    chunks = events(ask(router, "/v1/chat/completions", {**body, "stream": True}))
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == reply["choices"][0]["message"]["content"]


def test_refusals_pass_through(router: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        generate(router, input_ids=[72] * 2000, sampling_params={"max_new_tokens": 1})
    with refused.value:
        assert refused.value.code == 400
        assert "longer than the model's context length" in refused.value.read().decode()


def test_a_killed_worker_loses_no_request_and_another_takes_its_place(
    workers: list[str], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    victim = Worker(tiny_checkpoint)
    with contextlib.ExitStack() as stack:
        stack.callback(victim.end)
        stays, joins, dies = workers[0], workers[1], victim.address()
        router = stack.enter_context(running_router([stays, dies], tmp_path / "log.txt"))
        threads = stack.enter_context(ThreadPoolExecutor(6))
        sampling = {"max_new_tokens": 100, "ignore_eos": True}
        before = num_ended(stays)
        victim.process.send_signal(signal.SIGSTOP)
        asked = [threads.submit(generate, router, input_ids=[72], sampling_params=sampling) for _ in range(6)]
        until(lambda: num_ended(stays) >= before + 3)  # the others are at the one that stands still
        victim.process.kill()
        assert [len(each.result()["output_ids"]) for each in asked] == [100] * 6
        short = {"max_new_tokens": 2, "ignore_eos": True}
        for _ in range(4):
            assert len(generate(router, input_ids=[72], sampling_params=short)["output_ids"]) == 2
        until(lambda: healthy_workers(router) == {stays})
        assert json.loads(ask(router, "/workers", {"url": joins}))["url"] == joins
        until(lambda: healthy_workers(router) == {stays, joins})
        before = num_ended(joins)
        for _ in range(4):
            generate(router, input_ids=[72], sampling_params=short)
        assert num_ended(joins) == before + 2


async def test_fakes_are_routed_to_like_servers_and_what_one_of_them_refuses_the_other_does(tmp_path: Path) -> None:
    router_python()
    async with start_fake_sglang(mode="zero", num_workers=2) as fakes:
        with running_router(fakes.addresses, tmp_path / "log.txt") as router:
            await fakes.add_fault("status", status=500, times=1, path="/generate", worker=0)
            for _ in range(4):
                reply = generate(router, input_ids=[72, 101], sampling_params={"max_new_tokens": 7})
                assert reply["meta_info"]["output_token_logprobs_length"] == len(reply["output_ids"]) == 7
            asked = [(await fakes.stats(number))["requests"]["/generate"] for number in range(2)]
    assert min(asked) >= 2
    assert sum(asked) == 5


@pytest.fixture
def slime_source() -> Iterator[Source]:
    yield Source()
    slime_process.end()


def check_slime_sample(router: str, sample: Any) -> None:
    """Check lengths, and logprobs against what the engine says of the whole text."""
    assert sample.status.value in ("completed", "truncated")
    assert sample.response_length == len(sample.rollout_log_probs) == len(sample.tokens) - len(sample.prompt)
    scored = generate(router, input_ids=sample.tokens, logprob_start_len=0, sampling_params={"max_new_tokens": 0})
    told = [entry[0] for entry in scored["meta_info"]["input_token_logprobs"]][-sample.response_length :]
    assert sample.rollout_log_probs == pytest.approx(told, abs=1e-3)


def test_slimes_process_makes_steps_and_an_evaluation_with_aborts_and_weights_of_its_own(
    router: str, workers: list[str], tiny_checkpoint: Path, tmp_path: Path, slime_source: Source
) -> None:
    sets = [eval_set(tmp_path / "numbers.jsonl", min_new_tokens=4)]
    args = arguments(router, tiny_checkpoint, partial_rollout=True, eval_datasets=sets)
    trained: list[int] = []
    resumed: list[Any] = []
    step = 0
    # An abort may find every answer whole or not begun.
    while step < 3 or (not resumed and step < 20):
        if step == 2:
            for worker in workers:
                body = {"model_path": str(tiny_checkpoint), "weight_version": "3"}
                assert json.loads(ask(worker, "/update_weights_from_disk", body))["success"]
        output = generate_rollout(args, step, slime_source)
        assert [len(group) for group in output.samples] == [SIZE] * 3
        samples = [sample for group in output.samples for sample in group]
        assert [sample.index for sample in samples] == sorted(sample.index for sample in samples)
        assert [sample.reward["length"] for sample in samples] == [sample.response_length for sample in samples]
        check_slime_sample(router, samples[-1])
        trained += [group[0].group_index for group in output.samples]
        resumed += [sample for sample in samples if "start_rollout_id" in sample.metadata]
        step += 1
    assert any(sample.weight_versions[-1] == "3" for sample in samples)
    waiting = [group[0].group_index for group in slime_source.buffer]
    # Nothing is lost, and nothing is trained on twice.
    assert sorted(trained + waiting) == list(range(slime_source.num_drawn))
    check_slime_sample(router, max(resumed, key=lambda each: each.response_length))
    begun = [tokens for group in slime_source.returned for tokens, length in group if length]
    assert any(sample.tokens[: len(tokens)] == tokens for sample in resumed for tokens in begun)

    result = generate_rollout(args, step, slime_source, evaluation=True)
    numbers = result.data["numbers"]
    assert {name: len(values) for name, values in numbers.items()} == {"rewards": 6, "truncated": 6, "samples": 6}
    assert [sample.index for sample in numbers["samples"]] == list(range(6))
    assert all(4 <= sample.response_length <= 6 for sample in numbers["samples"])
    assert result.metrics["eval/numbers"] == sum(numbers["rewards"]) / 6
