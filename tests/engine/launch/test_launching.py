"""Servers that a run starts: up, watched, started again, and gone at the end whatever happens."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engine.launch.conftest import ROOT, STAND_IN, marked, wait_until

from rollfeed.config.launch import LaunchSettings
from rollfeed.engine.launch import KINDS, LaunchedEngine, LaunchedModel, server_commands
from rollfeed.errors import ConfigError, EngineProtocolError, EngineUnavailableError
from rollfeed.types import SamplingParams, TensorUpdate

PROMPT = np.array([1, 2, 3], np.int32)
WEIGHTS = {"weight": np.ones(4, np.float32)}


async def answer(engine: LaunchedEngine) -> int:
    completion = await engine.generate(PROMPT, SamplingParams(max_new_tokens=4), request_id="r")
    return completion.version_spans[-1].policy_version


async def seconds_until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - processes have no events
            await asyncio.sleep(0.05)


def main_process(mark: str) -> int:
    """The stand-in itself; its keeper's command has it further behind."""
    words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in marked(mark)}
    (pid,) = [pid for pid, each in words.items() if each[1].endswith(b"stand_in.py")]
    return pid


def keeper_process(mark: str) -> int:
    return int(Path(f"/proc/{main_process(mark)}/stat").read_text().rpartition(")")[2].split()[1])


async def test_servers_are_started_answer_and_leave_nothing_behind(engine_of: Any, mark: str, tmp_path: Path) -> None:
    async with engine_of(num_servers=2, flags={"grandchild": True}) as engine:
        assert engine.metrics()["live_workers"] == 2
        assert await answer(engine) == 0
        assert len(marked(mark)) == 6  # keepers, servers, grandchildren
    assert marked(mark) == []
    for number in range(2):
        assert '{"serving": ' in (tmp_path / "servers" / f"{number}.log").read_text()


async def test_a_server_that_dies_comes_back_with_the_published_weights(engine_of: Any, mark: str) -> None:
    async with engine_of(flags={"grandchild": True}) as engine:
        await engine.apply(TensorUpdate(WEIGHTS, policy_version=3))
        before = set(marked(mark))
        os.kill(main_process(mark), signal.SIGKILL)
        assert await answer(engine) == 3
        assert not before & set(marked(mark))
        assert engine.metrics()["dead_workers"] == engine.metrics()["readmitted_workers"] == 1


async def test_an_update_waits_for_a_server_that_dies_in_it(engine_of: Any, tmp_path: Path) -> None:
    async with engine_of(flags={"dies-in-updates": str(tmp_path / "died")}) as engine:
        await engine.apply(TensorUpdate(WEIGHTS, policy_version=1))
        assert (engine.policy_version, await answer(engine)) == (1, 1)
        assert engine.metrics()["weight_updates"] == 1


async def test_an_update_that_a_running_server_fails_is_not_waited_for(engine_of: Any, tmp_path: Path) -> None:
    async with engine_of() as engine:
        engine._http.command = engine._http.ask = fail
        with pytest.raises(EngineUnavailableError, match="no worker has version 1: broken"):
            await engine.apply(TensorUpdate(WEIGHTS, policy_version=1))


async def fail(*_: Any, **__: Any) -> Any:
    raise EngineUnavailableError("broken")


async def test_a_keeper_that_is_killed_takes_its_server_along_and_another_one_comes(engine_of: Any, mark: str) -> None:
    async with engine_of(flags={"grandchild": True}) as engine:
        before = set(marked(mark))
        os.kill(keeper_process(mark), signal.SIGKILL)
        await seconds_until(lambda: engine.metrics()["readmitted_workers"])
        assert not before & set(marked(mark))
        assert await answer(engine) == 0


async def test_a_server_that_keeps_dying_stays_out_and_its_requests_say_why(engine_of: Any) -> None:
    async with engine_of(flags={"ends-when-asked": True}, max_restarts=1) as engine:
        with pytest.raises(EngineUnavailableError) as caught:
            await answer(engine)
    told = str(caught.value)
    assert "server 0 (SGLang, http://127.0.0.1:" in told
    assert "with exit code 7" in told
    assert "not started again after 1 restarts (engine.launch.max_restarts)" in told
    assert "\n" not in told


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (
            {"flags": {"frobnicate": True}},
            ("did not start: it ended with exit code 2", "unrecognized arguments: --frobnicate", "engine.launch.flags"),
        ),
        ({"flags": {"raises": True}}, ("RuntimeError: no kernel image is available", "0.log")),
        (
            {"flags": {"slow": 60}, "startup_timeout_seconds": 0.5},
            ("not healthy within startup_timeout_seconds = 0.5",),
        ),
    ],
)
async def test_a_server_that_does_not_start_is_told_of_in_one_line(engine_of: Any, given: Any, parts: Any) -> None:
    with pytest.raises(EngineUnavailableError) as caught:
        async with engine_of(**given):
            pass
    told = str(caught.value)
    assert told.startswith("engine.launch: server 0 (SGLang, http://127.0.0.1:")
    assert all(part in told for part in parts), told
    assert "\n" not in told


async def test_a_start_that_is_broken_off_leaves_nothing(engine_of: Any, mark: str) -> None:
    starting = asyncio.create_task(engine_of(num_servers=2, flags={"slow": 60, "grandchild": True}).__aenter__())
    await seconds_until(lambda: len(marked(mark)) == 6)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert marked(mark) == []


async def test_a_start_that_is_broken_off_before_its_keeper_is_known_leaves_nothing(
    launcher_of: Any, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = asyncio.create_subprocess_exec

    async def create_late(*words: Any, **options: Any) -> Any:
        keeper = await create(*words, **options)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:  # as asyncio does
            keeper.kill()
            await keeper.wait()
            raise

    monkeypatch.setattr(asyncio, "create_subprocess_exec", create_late)
    starting = asyncio.create_task(launcher_of(flags={"slow": 60, "grandchild": True}).start(None))
    await seconds_until(lambda: len(marked(mark)) == 3)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert marked(mark) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"command": ["/no/such/program"]}, "engine.launch.command: there is no program '/no/such/program': install"),
        ({"command": []}, "engine.launch.command: there is no SGLang for '"),
        ({"gpus": [[0], [99]]}, "engine.launch.gpus: there is no GPU 99: this process sees "),
        ({"gpus_per_server": 64}, "engine.launch.gpus_per_server: there is no GPU 63: this process sees "),
        ({"flags": {"port": 1}}, "engine.launch.flags.port: is chosen here: remove it"),
    ],
)
def test_what_cannot_be_is_found_before_anything_starts(launcher_of: Any, given: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        launcher_of(**given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_port_that_is_taken_is_named(launcher_of: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"engine.launch: port {port} cannot be had \(Address already in use\)"):
            launcher_of(port=port)


def test_words_say_what_rollouts_need_and_what_the_user_adds(launcher_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    flags = {"enable_scale_out": False, "--dtype": "float32", "lora-modules": ["a=b", "c=d"], "x": {"y": 1}}
    launcher = launcher_of("openai", gpus_per_server=2, num_servers=2, port=31400, flags=flags, colocate=True)
    first, second = (server.command for server in launcher._servers.values())
    assert first.words[2:] == (
        *(first.words[2], "--host", "127.0.0.1", "--port", "31400", "--served-model-name", "policy"),
        *("--logprobs-mode", "processed_logprobs", "--max-model-len", "512", "--tensor-parallel-size", "2"),
        *("--enable-sleep-mode", "--dtype", "float32", "--lora-modules", "a=b", "c=d", "--x", '{"y": 1}'),
    )
    assert first.environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert [each.environment["CUDA_VISIBLE_DEVICES"] for each in (first, second)] == ["4,5", "6,7"]
    assert second.words[6] == "31401"


def test_each_server_is_split_over_its_own_gpus(launcher_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    launcher = launcher_of(gpus=[[0], [1, 2]])
    first, second = (server.command.words for server in launcher._servers.values())
    assert "--tp-size" not in first
    assert second[-2:] == ("--tp-size", "2")


async def test_servers_sleep_and_wake(engine_of: Any, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    async with engine_of(flags={"calls": str(calls)}, colocate=True) as engine:
        asked = asyncio.create_task(answer(engine))
        await asyncio.sleep(0)
        await engine.sleep()
        async with asyncio.timeout(60):
            while calls.read_text():  # a probe that was under way may go on
                calls.write_text("")
                await asyncio.sleep(1.0)  # others would come every 0.05 s
        later = asyncio.create_task(answer(engine))
        await asyncio.sleep(0.3)
        assert calls.read_text() == ""
        assert not later.done()
        await engine.wake_up()
        assert [await asked, await later] == [0, 0]
    assert calls.read_text().startswith("/resume_memory_occupation")


async def test_a_server_that_is_busy_is_not_put_to_sleep(engine_of: Any, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    async with engine_of(flags={"calls": str(calls), "busy": True}, colocate=True) as engine:
        await engine.sleep()
        assert "/release_memory_occupation" not in calls.read_text()
        assert engine.metrics()["live_workers"] == 0
        await engine.wake_up()
        await seconds_until(lambda: engine.metrics()["live_workers"] == 1)


async def test_nothing_is_started_while_servers_sleep(engine_of: Any, mark: str) -> None:
    async with engine_of() as engine:
        await engine.sleep()
        os.kill(main_process(mark), signal.SIGKILL)
        await seconds_until(lambda: not marked(mark))
        await asyncio.sleep(1.5)  # it would be started after one second
        assert not marked(mark)
        await engine.wake_up()
        assert await answer(engine) == 0


async def test_a_server_that_is_being_started_again_is_waited_for_and_sleeps_too(
    engine_of: Any, mark: str, tmp_path: Path
) -> None:
    calls = tmp_path / "calls"
    async with engine_of(num_servers=2, flags={"calls": str(calls), "slow": 1.0}, colocate=True) as engine:
        killed = keeper_of(engine, 0)
        os.kill(killed, signal.SIGKILL)
        await seconds_until(lambda: engine.metrics()["dead_workers"])
        await seconds_until(lambda: keeper_of(engine, 0) != killed)
        calls.write_text("")
        await engine.sleep()
        assert calls.read_text().count("/release_memory_occupation") == 2
        await engine.wake_up()
        await seconds_until(lambda: engine.metrics()["live_workers"] == 2)


def keeper_of(engine: LaunchedEngine, number: int) -> int:
    return list(engine.launcher._servers.values())[number].keeper.pid


async def test_a_server_that_is_lost_is_not_taken_for_the_one_that_has_just_ended(launcher_of: Any) -> None:
    launcher = launcher_of(num_servers=2)
    lost, ended = launcher._servers.values()
    lost.is_lost = True
    lost.is_down.set()
    lost.is_settled.set()

    async def end_and_come_back() -> None:
        await asyncio.sleep(0.05)
        ended.is_down.set()
        ended.is_settled.set()

    coming = asyncio.create_task(end_and_come_back())
    assert await launcher.revive()
    await coming
    ended.is_lost = True
    assert not await launcher.revive()


async def test_a_server_that_is_too_slow_is_explained_by_what_it_said_before_it_was_ended(
    launcher_of: Any, tmp_path: Path
) -> None:
    program = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit('RuntimeError: told to end'))\n"
        "print('loading weights', flush=True)\n"
        "time.sleep(60)\n"
    )

    async def too_slow(address: str) -> None:
        """End the waiting as its deadline does, when the server has said something."""
        await seconds_until(lambda: "\nloading weights" in (tmp_path / "servers" / "0.log").read_text())
        raise TimeoutError

    with pytest.raises(EngineUnavailableError) as caught:
        await launcher_of(command=[sys.executable, "-c", program]).start(too_slow)
    assert "was not healthy within startup_timeout_seconds = 300" in str(caught.value)
    assert "ends with: loading weights; look there" in str(caught.value)


async def test_a_server_that_refuses_to_sleep_is_an_error(engine_of: Any) -> None:
    async with engine_of() as engine:
        engine._http.ask = refuse
        with pytest.raises(EngineProtocolError, match="no such route"):
            await engine.sleep()


async def refuse(*_: Any, **__: Any) -> Any:
    raise EngineProtocolError("no such route")


OWNER = """
import asyncio, os, sys
from pathlib import Path
from rollfeed.config import LaunchSettings
from rollfeed.engine.launch import KINDS, LaunchedEngine, LaunchedModel, ServerLauncher, server_commands

async def healthy(address):
    if os.fork() == 0:  # holds what this process has open
        import time
        time.sleep(600)

async def main():
    settings = LaunchSettings(command=tuple(sys.argv[2:]), flags={"grandchild": True, "slow": 600})
    model = LaunchedModel(Path("model"), name="policy", context_length=512)
    launcher = ServerLauncher(server_commands(settings, KINDS["sglang"], model), settings)
    launcher.log_folder = Path(sys.argv[1])
    await launcher.start(healthy)
    print("up", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_servers_are_told_to_return_experts() -> None:
    settings = LaunchSettings(command=(sys.executable,))
    model = LaunchedModel(Path("model"), name="policy", context_length=512)
    flag = "--enable-return-routed-experts"
    for kind in KINDS.values():
        assert flag not in server_commands(settings, kind, model)[0].words
        assert flag in server_commands(settings, kind, model._replace(returns_experts=True))[0].words


def test_nothing_is_left_when_the_process_is_killed(tmp_path: Path, mark: str) -> None:
    name, _, value = mark.partition("=")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), name: value}
    words = [sys.executable, "-c", OWNER, str(tmp_path / "servers"), *STAND_IN]
    owner = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "up\n"
    # Owner, its fork, keeper, server and what that has left in a session of its own.
    wait_until(lambda: len(marked(mark)) == 5)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    (fork,) = wait_until(lambda: found if len(found := marked(mark)) == 1 else None)
    os.kill(fork, signal.SIGKILL)
