"""New weights: no request in between, every server confirms, and running requests survive."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from safetensors.numpy import load_file

from rollfeed.engine.client import ServerEngine
from rollfeed.errors import EngineProtocolError, EngineUnavailableError
from rollfeed.protocols import Command, MetServer
from rollfeed.testing.fake_sglang import serve_fake_sglang
from rollfeed.testing.virtual_loop import in_virtual_time
from rollfeed.types import FinishKind, SamplingParams, TensorUpdate, VersionSpan, WeightUpdate

PROMPT = np.array([3, 4, 5], np.int32)
EngineAt = Callable[..., ServerEngine]
Until = Callable[[Callable[[], bool]], Awaitable[None]]
TENSORS = {"w": np.arange(4, dtype=np.float32)}


def is_there(path: Path) -> bool:
    return path.exists()


async def test_r45_no_request_before_the_last_server_has_confirmed(
    scripted: Any, engine_at: EngineAt, until: Until
) -> None:
    async with scripted(3) as servers, engine_at(*servers) as engine:
        late = servers[1]
        late.update_gate = asyncio.Event()
        updating = asyncio.create_task(engine.apply(TensorUpdate(TENSORS, policy_version=2)))
        await until(lambda: bool(late.bodies("/update_weights_from_disk")))
        params = SamplingParams(max_new_tokens=3)
        tasks = [asyncio.create_task(engine.generate(PROMPT + i, params, request_id=f"r{i}")) for i in range(60)]
        await until(lambda: {server.version for server in (servers[0], servers[2])} == {"2"})
        await asyncio.sleep(0.05)
        assert [server.requests for server in servers] == [[], [], []]
        late.update_gate.set()
        await updating
        completions = await asyncio.gather(*tasks)
        assert all(server.requests for server in servers)
        assert {span.policy_version for each in completions for span in each.version_spans} == {2}
        assert engine.policy_version == 2


async def test_what_runs_goes_on_with_the_new_weights_and_spans_tell_which_token_is_whose(engine_at: EngineAt) -> None:
    script = [
        {"output_ids": [1, 2, 3, 4], "finish_reason": "length", "delay_seconds": 60.0, "num_tokens_when_aborted": 2}
    ]
    async with (
        serve_fake_sglang(mode="scripted", script=script) as fakes,
        engine_at(fakes.address, weight_update="abort") as engine,
    ):
        task = asyncio.create_task(engine.generate(PROMPT, SamplingParams(max_new_tokens=6), request_id="r"))
        await fakes.wait_until(lambda stats: stats["requests"].get("/generate", 0) == 1)
        await engine.apply(TensorUpdate(TENSORS, policy_version=4))
        completion = await task
        assert completion.version_spans == (VersionSpan(0, 2, 0), VersionSpan(2, 6, 4))
        assert completion.finish_reason.kind is FinishKind.LENGTH
        assert len(completion.token_ids) == 6
        assert engine.metrics()["weight_updates"] == 1


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
@pytest.mark.parametrize("router", [None, "new"])
async def test_a_busy_server_survives_updates(engine_at: EngineAt, mode: str, router: str | None) -> None:
    model = {"num_slots": 8, "median_length": 60.0, "max_length": 100}
    async with serve_fake_sglang(
        mode="time-model", num_workers=2, router=router, time_model=model, speed=4.0, update_seconds=0.1
    ) as fakes:
        where = {"router": fakes.router_address} if router else {"workers": fakes.addresses}
        async with engine_at(**where, weight_update=mode) as engine:
            params = SamplingParams(max_new_tokens=100)
            tasks = [asyncio.create_task(engine.generate(PROMPT + i, params, request_id=f"r{i}")) for i in range(40)]
            for version in (1, 2, 3):
                await asyncio.sleep(0.03)
                await engine.apply(TensorUpdate(TENSORS, policy_version=version))
            completions = await asyncio.gather(*tasks)
            assert all(each.finish_reason.kind is not FinishKind.ABORT for each in completions)
            versions = {span.policy_version for each in completions for span in each.version_spans}
            assert versions <= {0, 1, 2, 3}
            assert engine.policy_version == 3
            assert engine.metrics()["dead_workers"] == 0
            assert {(await fakes.stats(worker))["weight_version"] for worker in (0, 1)} == {"3"}


async def test_a_server_that_fails_an_update_is_out_until_it_has_it(scripted: Any, engine_at: EngineAt) -> None:
    async with scripted(2) as servers, engine_at(*servers, probe_interval_seconds=30.0) as engine:
        bad = servers[0]
        bad.answers["/update_weights_from_disk"] = _server_error
        await engine.apply(TensorUpdate(TENSORS, policy_version=2))
        params = SamplingParams(max_new_tokens=3)
        await asyncio.gather(*(engine.generate(PROMPT + i, params, request_id=f"r{i}") for i in range(20)))
        assert bad.requests == []
        assert engine.metrics()["live_workers"] == 1


async def _server_error(_request: Any) -> Any:
    from aiohttp import web

    return web.json_response({"error": {"message": "no memory"}}, status=500)


async def test_weights_that_no_server_takes_change_nothing(scripted: Any, engine_at: EngineAt) -> None:
    async with scripted(2) as servers, engine_at(*servers) as engine:
        for server in servers:
            server.answers["/update_weights_from_disk"] = _refused
        with pytest.raises(
            EngineProtocolError, match=r"weights not taken: version . .* go on with 0: .*no such tensor"
        ):
            await engine.apply(TensorUpdate(TENSORS, policy_version=2))
        assert engine.policy_version == 0
        assert engine.metrics()["live_workers"] == 2
        completion = await engine.generate(PROMPT, SamplingParams(max_new_tokens=2), request_id="r")
        assert completion.version_spans == (VersionSpan(0, 2, 0),)


async def _refused(_request: Any) -> Any:
    from aiohttp import web

    return web.json_response({"success": False, "message": "no such tensor"}, status=400)


async def test_an_update_that_leaves_no_server_says_so(scripted: Any, engine_at: EngineAt) -> None:
    async with scripted() as (server,), engine_at(server) as engine:
        server.answers["/update_weights_from_disk"] = _server_error
        with pytest.raises(EngineUnavailableError, match=r"no worker has version 2: .*no memory"):
            await engine.apply(TensorUpdate(TENSORS, policy_version=2))


async def test_the_weights_are_written_with_configuration_and_only_the_last_two_are_kept(
    scripted: Any, engine_at: EngineAt, tmp_path: Path
) -> None:
    async with scripted() as (server,), engine_at(server, weights_folder=str(tmp_path / "weights")) as engine:
        for version in (1, 2, 3):
            await engine.apply(TensorUpdate({"w": np.full(3, version, np.float32)}, policy_version=version))
        sent = [Path(body["model_path"]) for body in server.bodies("/update_weights_from_disk")]
    assert [path.exists() for path in sent] == [False, True, True]
    assert load_file(sent[-1] / "model.safetensors")["w"].tolist() == [3.0, 3.0, 3.0]
    assert sent[-1].parent.parent == tmp_path / "weights"


async def test_temporary_weights_go_with_the_engine(scripted: Any, engine_at: EngineAt) -> None:
    async with scripted() as (server,):
        async with engine_at(server) as engine:
            await engine.apply(TensorUpdate(TENSORS, policy_version=1))
            folder = Path(server.bodies("/update_weights_from_disk")[0]["model_path"])
            assert is_there(folder)
        assert not is_there(folder.parent)


async def test_pause_holds_new_requests_here_until_it_ends(scripted: Any, engine_at: EngineAt) -> None:
    async with scripted(2) as servers, engine_at(*servers) as engine:
        await engine.pause()
        params = SamplingParams(max_new_tokens=2)
        task = asyncio.create_task(engine.generate(PROMPT, params, request_id="r"))
        await asyncio.sleep(0.05)
        assert not task.done()
        assert [server.requests for server in servers] == [[], []]
        await engine.apply(TensorUpdate(TENSORS, policy_version=1))
        assert not task.done()
        await engine.resume()
        assert (await task).version_spans == (VersionSpan(0, 2, 1),)
        for server in servers:
            paths = [path for path, _ in server.calls if path in ("/pause_generation", "/continue_generation")]
            assert paths[0] == "/pause_generation"
            assert paths[-1] == "/continue_generation"


async def test_a_version_that_somebody_else_published_everywhere_is_taken_over(
    scripted: Any, engine_at: EngineAt, until: Until
) -> None:
    async with scripted(2) as servers, engine_at(*servers) as engine:
        for server in servers:
            server.version = "9"
        await until(lambda: engine.policy_version == 9)
        assert engine.metrics()["dead_workers"] == 0


async def test_the_embedded_server_takes_new_weights_and_pauses(
    embedded_server: Any, engine_at: EngineAt, tiny_checkpoint: Path
) -> None:
    tensors = load_file(tiny_checkpoint / "model.safetensors")
    async with embedded_server() as address, engine_at(address, context_length=200) as engine:
        assert engine.precision == "fp32"
        greedy = SamplingParams(max_new_tokens=12, temperature=0.0)
        before = await engine.generate(PROMPT, greedy, request_id="before")
        await engine.apply(TensorUpdate({name: values * 0.5 for name, values in tensors.items()}, policy_version=1))
        after = await engine.generate(PROMPT, greedy, request_id="after")
        assert {span.policy_version for span in after.version_spans} == {1}
        assert not np.array_equal(before.logprobs, after.logprobs)
        await engine.apply(TensorUpdate(tensors, policy_version=2))
        again = await engine.generate(PROMPT, greedy, request_id="again")
        assert np.array_equal(before.token_ids, again.token_ids)
        await engine.pause()
        await engine.resume()


@dataclass(frozen=True, slots=True)
class Cached(WeightUpdate):
    """An update of a transport's own: a server is told where the weights are in its memory."""

    key: str

    async def prepare(self, address: str, command: Command) -> int:
        await command("/prepare_weights", {"key": self.key})
        return 3

    async def load(self, address: str, command: Command) -> int:
        told = await command("/update_weights_from_cache", {"key": self.key, "at": address})
        if told.get("success") is not True:
            raise EngineProtocolError("not taken")
        return 4


class CacheTransport:
    """Fits :class:`rollfeed.protocols.WeightTransport`."""

    is_closed = False

    def meet(self, servers: Sequence[MetServer]) -> None:
        assert {each.num_ranks for each in servers} == {1}

    async def stage(self, update: TensorUpdate) -> Cached:
        return Cached(f"key-{len(update.tensors)}", policy_version=update.policy_version)

    def close(self) -> None:
        self.is_closed = True


async def test_a_transport_may_have_an_update_of_its_own(scripted: Any, engine_at: EngineAt) -> None:
    async with scripted(2) as servers:
        for server in servers:
            server.answers |= {"/update_weights_from_cache": _taken_by(servers), "/prepare_weights": _done}
        transport = CacheTransport()
        async with engine_at(*servers, transport=transport) as engine:
            await engine.apply(TensorUpdate(TENSORS, policy_version=3))
            assert [server.bodies("/update_weights_from_cache")[0]["key"] for server in servers] == ["key-1"] * 2
            assert engine.policy_version == 3
            with pytest.raises(EngineProtocolError, match="servers take no WeightUpdate"):
                await engine.apply(WeightUpdate(policy_version=4))
        assert transport.is_closed


def _taken_by(servers: list[Any]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def take(request: web.Request) -> web.Response:
        body = await request.json()
        next(each for each in servers if each.address == body["at"]).version = "3"
        return web.json_response({"success": True})

    return take


async def _done(_request: web.Request) -> web.Response:
    return web.json_response({"success": True})


async def test_servers_prepare_while_they_serve(scripted: Any, engine_at: EngineAt, until: Until) -> None:
    async with scripted(2) as servers:
        go_on = asyncio.Event()

        async def prepare(_request: web.Request) -> web.Response:
            await go_on.wait()
            return web.json_response({})

        for server in servers:
            server.answers |= {"/update_weights_from_cache": _taken_by(servers), "/prepare_weights": prepare}
        async with engine_at(*servers, transport=CacheTransport()) as engine:
            updating = asyncio.create_task(engine.apply(TensorUpdate(TENSORS, policy_version=3)))
            await until(lambda: all(server.bodies("/prepare_weights") for server in servers))
            completion = await engine.generate(PROMPT, SamplingParams(max_new_tokens=3), request_id="r")
            assert completion.version_spans == (VersionSpan(0, 3, 0),)
            assert not any(server.bodies("/pause_generation") for server in servers)
            go_on.set()
            await updating
            assert engine.policy_version == 3


async def test_a_server_that_does_not_prepare_is_out_until_it_has_the_version(
    scripted: Any, engine_at: EngineAt, until: Until
) -> None:
    async with scripted(2) as servers:
        for server in servers:
            server.answers |= {"/update_weights_from_cache": _taken_by(servers), "/prepare_weights": _done}
        servers[0].answers["/prepare_weights"] = _server_error
        async with engine_at(*servers, transport=CacheTransport()) as engine:
            await engine.apply(TensorUpdate(TENSORS, policy_version=3))
            assert engine.metrics()["live_workers"] == 1
            assert (servers[0].version, engine.policy_version) == ("default", 3)
            servers[0].answers["/prepare_weights"] = _done
            await until(lambda: engine.metrics()["live_workers"] == 2)
            assert servers[0].version == "3"


async def test_what_no_server_prepares_changes_nothing(scripted: Any, engine_at: EngineAt) -> None:
    async with scripted(2) as servers, engine_at(*servers, transport=CacheTransport()) as engine:
        for server in servers:
            server.answers["/prepare_weights"] = _refused
        with pytest.raises(
            EngineProtocolError, match=r"weights not taken: version . .* go on with 0: .*no such tensor"
        ):
            await engine.apply(TensorUpdate(TENSORS, policy_version=3))
        assert (engine.policy_version, engine.metrics()["live_workers"]) == (0, 2)
        assert not any(server.bodies("/pause_generation") for server in servers)


@in_virtual_time
async def test_servers_that_rest_are_left_alone_and_woken_at_the_version_that_somebody_else_gave_them(
    scripted: Any, engine_at: EngineAt, until: Until
) -> None:
    async with scripted(3) as servers, engine_at(*servers, probes_until_dead=1) as engine:
        await until(lambda: all(server.calls.count(("/health", {})) > 1 for server in servers))
        engine.weights.rest()
        await asyncio.sleep(0.1)  # a probe that is under way
        before = [len(server.calls) for server in servers]
        for server in servers[:2]:
            server.version = "5"
        await servers[2].kill()
        await asyncio.sleep(0.3)  # six probes
        assert [len(server.calls) for server in servers] == before
        await engine.weights.wake()
        assert engine.policy_version == 5
        completion = await engine.generate(PROMPT, SamplingParams(max_new_tokens=3), request_id="r")
        assert [span.policy_version for span in completion.version_spans] == [5]
        await servers[2].start()  # with weights that are older: it stays out
        for number in range(6):
            await engine.generate(PROMPT, SamplingParams(max_new_tokens=3), request_id=f"r{number}")
        assert not servers[2].requests
        for server in servers:
            await server.kill()
        engine.weights.rest()
        with pytest.raises(EngineUnavailableError, match="none of 3 servers tells its version"):
            await engine.weights.wake()


@in_virtual_time
async def test_a_server_that_came_back_while_it_rested_is_woken_too(
    scripted: Any, engine_at: EngineAt, until: Until
) -> None:
    async with scripted(1) as servers, engine_at(*servers, probes_until_dead=1, max_tries=1) as engine:
        await servers[0].kill()
        await until(lambda: engine.metrics()["live_workers"] == 0)
        engine.weights.rest()
        await servers[0].start()
        servers[0].version = "5"
        await engine.weights.wake()
        completion = await engine.generate(PROMPT, SamplingParams(max_new_tokens=3), request_id="r")
        assert [span.policy_version for span in completion.version_spans] == [5]
