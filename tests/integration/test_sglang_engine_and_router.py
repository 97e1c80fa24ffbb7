"""The SGLang engine through the real ``sglang-router``, over fake servers that take their time."""

import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import STDOUT, Popen

import numpy as np
import pytest
from aiohttp import ClientError
from tests.held_ports import held_port

from rollfeed.config import SGLangSettings
from rollfeed.engine.client import ServerEngine
from rollfeed.engine.dialects import SGLang
from rollfeed.testing import CharTokenizer
from rollfeed.testing.fake_sglang import Fakes, start_fake_sglang
from rollfeed.types import Completion, FinishKind, SamplingParams, TensorUpdate
from rollfeed.weights import DiskTransport

PARAMS = SamplingParams(max_new_tokens=100)
PROMPT = np.arange(10, dtype=np.int32)
OWN_ENVIRONMENT = Path(__file__).parents[2] / ".venv-router"


def router_python() -> str:
    """The Python that has the wheel; without one there is nothing to test."""
    named = os.environ.get("ROLLFEED_ROUTER_PYTHON", str(OWN_ENVIRONMENT / "bin" / "python"))
    if not Path(named).exists():
        pytest.skip("no sglang-router: `make install` makes .venv-router, ROLLFEED_ROUTER_PYTHON names another one")
    return named


@contextmanager
def running_router(workers: Sequence[str], log: Path) -> Iterator[str]:
    with held_port() as port, held_port() as metrics_port:
        options = ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", *workers, "--policy", "round_robin"]
        options += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
        command = [router_python(), "-m", "sglang_router.launch_router", *options]
        with log.open("w") as file:
            process = Popen(command, stdout=file, stderr=STDOUT)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def ask(engine: ServerEngine, name: str, count: int) -> list[asyncio.Task[Completion]]:
    return [
        asyncio.create_task(engine.generate(PROMPT + number, PARAMS, request_id=f"{name}{number}"))
        for number in range(count)
    ]


async def until_counted(engine: ServerEngine, name: str) -> None:
    """Wait until the engine has counted one."""
    async with asyncio.timeout(120):
        while engine.metrics()[name] < 1:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.05)


async def until_cleared(fakes: Fakes) -> None:
    """Let nothing go wrong any more at the server that was lost, as soon as it listens again."""
    async with asyncio.timeout(120):
        while True:
            with suppress(ClientError):
                return await fakes.clear_faults(worker=1)
            await asyncio.sleep(0.05)


def kinds(completions: Sequence[Completion]) -> set[FinishKind]:
    assert all(len(each.token_ids) == len(each.logprobs) for each in completions)
    return {each.finish_reason.kind for each in completions}


@pytest.mark.skipif(sys.platform != "linux", reason="the wheel is for Linux")
async def test_weights_aborts_and_a_lost_server_behind_the_real_router(tmp_path: Path) -> None:
    model = {"num_slots": 8, "median_length": 60.0, "max_length": 100}
    async with start_fake_sglang(mode="time-model", num_workers=2, time_model=model) as fakes:
        with running_router(fakes.addresses, tmp_path / "log.txt") as address:
            # A server that is slow to answer a probe is not taken for dead.
            settings = SGLangSettings(
                router=address, concurrency=32, probe_interval_seconds=0.3, probe_timeout_seconds=60
            )
            async with ServerEngine(
                SGLang(settings), context_length=4096, tokenizer=CharTokenizer(), transport=DiskTransport(tmp_path)
            ) as engine:
                asked = ask(engine, "updated", 40)
                # The one that ends first is all of version 0; of the others some have most likely not begun.
                await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                await engine.apply(TensorUpdate({"w": np.zeros(3, np.float32)}, policy_version=1))
                completions = await asyncio.gather(*asked, *ask(engine, "later", 1))
                assert FinishKind.ABORT not in kinds(completions)
                versions = [span.policy_version for each in completions for span in each.version_spans]
                assert set(versions) == {0, 1}

                before = (await fakes.stats())["requests"]["/generate"]
                asked = ask(engine, "aborted", 400)  # more than end while this waits
                await fakes.wait_until(lambda stats: stats["requests"]["/generate"] > before)
                await engine.abort()
                assert FinishKind.ABORT in kinds(await asyncio.gather(*asked))

                asked = ask(engine, "moved", 60)
                await asyncio.sleep(0)
                # It is not healthy before it has been found dead, however long that takes.
                await fakes.add_fault("status", worker=1, path="/health", status=503)
                await fakes.add_fault("refuse", worker=1, seconds=1.0)
                assert FinishKind.ABORT not in kinds(await asyncio.gather(*asked))
                await until_counted(engine, "dead_workers")
                await until_cleared(fakes)
                await until_counted(engine, "readmitted_workers")
                completions = await asyncio.gather(*ask(engine, "after", 20))
                assert {span.policy_version for each in completions for span in each.version_spans} == {1}
                assert engine.metrics()["dead_workers"] == 1
                assert engine.metrics()["rejected_replies"] == 0
