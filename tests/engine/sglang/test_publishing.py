"""Versions never go down, one trainer publishes, and a server whose update goes wrong comes back with the right one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from rollfeed.engine.client import ServerEngine
from rollfeed.errors import EngineProtocolError, EngineUnavailableError
from rollfeed.protocols import Command
from rollfeed.testing.fake_sglang import serve_fake_sglang
from rollfeed.testing.virtual_loop import in_virtual_time
from rollfeed.types import SamplingParams, TensorUpdate, WeightUpdate

PROMPT = np.array([3, 4, 5], np.int32)
UPDATE = "/update_weights_from_disk"
EngineAt = Callable[..., ServerEngine]
Until = Callable[[Callable[[], bool]], Awaitable[None]]


def tensors(policy_version: int) -> TensorUpdate:
    return TensorUpdate({"w": np.full(4, policy_version, np.float32)}, policy_version=policy_version)


async def versions_answered(engine: ServerEngine) -> set[int]:
    params = SamplingParams(max_new_tokens=3)
    asked = (engine.generate(PROMPT + i, params, request_id=f"r{i}") for i in range(8))
    return {span.policy_version for each in await asyncio.gather(*asked) for span in each.version_spans}


async def test_versions_do_not_go_down(scripted: Any, engine_at: EngineAt) -> None:
    async with scripted(2) as servers, engine_at(*servers) as engine:
        await engine.apply(tensors(5))
        with pytest.raises(EngineProtocolError, match="version 4 not published: the servers have 5: give it a higher"):
            await engine.apply(tensors(4))
        assert engine.policy_version == 5
        assert [len(server.bodies(UPDATE)) for server in servers] == [1, 1]
        await engine.apply(tensors(5))
        assert await versions_answered(engine) == {5}


async def test_only_the_first_update_goes_back_behind_an_earlier_process(scripted: Any, engine_at: EngineAt) -> None:
    async with scripted(2) as servers:
        for server in servers:
            server.version = "9"
        async with engine_at(*servers) as engine:
            assert engine.policy_version == 9
            await engine.apply(tensors(7))
            assert engine.policy_version == 7
            assert await versions_answered(engine) == {7}
            with pytest.raises(EngineProtocolError, match="version 6 not published"):
                await engine.apply(tensors(6))


async def test_another_publisher_is_named_and_nothing_is_published(scripted: Any, engine_at: EngineAt) -> None:
    async with scripted(2) as servers, engine_at(*servers, probe_interval_seconds=30.0) as engine:
        await engine.apply(tensors(1))
        servers[1].version = "2"
        told = f"version 2 not published: {servers[1].address} serves version 2, and 1 is the newest .*stop the other"
        with pytest.raises(EngineProtocolError, match=told):
            await engine.apply(tensors(2))
        assert engine.policy_version == 1
        assert engine.metrics()["live_workers"] == 2
        assert [len(server.bodies(UPDATE)) for server in servers] == [1, 1]


async def test_what_somebody_else_has_published_to_all_is_not_gone_back_behind(
    scripted: Any, engine_at: EngineAt, until: Until
) -> None:
    async with scripted(2) as servers, engine_at(*servers) as engine:
        for server in servers:
            server.version = "8"
        await until(lambda: engine.policy_version == 8)
        with pytest.raises(EngineProtocolError, match="the servers have 8 from somebody else: stop the other trainer"):
            await engine.apply(tensors(7))


async def test_servers_that_a_killed_publisher_has_left_behind_come_back_with_the_next_version(
    scripted: Any, engine_at: EngineAt, until: Until
) -> None:
    async with scripted(2) as servers:
        servers[0].version = "8"
        async with engine_at(*servers) as engine:
            assert (engine.policy_version, engine.metrics()["live_workers"]) == (8, 1)
            assert await versions_answered(engine) == {8}
            assert servers[1].requests == []
            await engine.apply(tensors(9))
            await until(lambda: engine.metrics()["live_workers"] == 2)
            assert [server.version for server in servers] == ["9", "9"]
            assert await versions_answered(engine) == {9}


@in_virtual_time
async def test_a_late_server_is_waited_for_within_bounds_and_rebuilt(
    scripted: Any, engine_at: EngineAt, until: Until
) -> None:
    async with scripted(3) as servers, engine_at(*servers, late_update_seconds=1.5) as engine:
        late, go_on = servers[2], asyncio.Event()

        async def half(request: web.Request) -> web.Response:
            late.version = (await request.json())["weight_version"]
            await go_on.wait()
            return web.json_response({"success": True})

        late.answers[UPDATE] = half
        await engine.apply(tensors(2))
        assert (engine.policy_version, engine.metrics()["live_workers"]) == (2, 2)
        assert await versions_answered(engine) == {2}
        assert late.requests == []
        go_on.set()
        await until(lambda: engine.metrics()["live_workers"] == 3)
        # By its own word it had them long ago, and perhaps half of them: it is given them again.
        assert len(late.bodies(UPDATE)) == 2


@in_virtual_time
async def test_a_server_that_hangs_while_it_is_rebuilt_holds_up_no_newer_version(
    scripted: Any, engine_at: EngineAt, until: Until
) -> None:
    async with scripted(2) as servers, engine_at(*servers, late_update_seconds=1.5) as engine:
        servers[1].update_gate = asyncio.Event()
        await engine.apply(tensors(1))
        await until(lambda: len(servers[1].bodies(UPDATE)) == 2)
        async with asyncio.timeout(60):
            await engine.apply(tensors(2))
        assert await versions_answered(engine) == {2}
        servers[1].update_gate.set()
        await until(lambda: engine.metrics()["live_workers"] == 2)
        assert servers[1].version == "2"


@dataclass(frozen=True, eq=False)
class Prepared(WeightUpdate):
    """Is prepared and loaded as it is told."""

    at: Callable[[str], Awaitable[None]]

    async def prepare(self, address: str, command: Command) -> int:
        del command
        await self.at(address)
        return 1

    async def load(self, address: str, command: Command) -> int:
        await command("/update_weights_from_disk", {"weight_version": str(self.policy_version)})
        return 2


@in_virtual_time
async def test_a_server_that_came_back_meanwhile_and_does_not_prepare_holds_up_no_others(
    scripted: Any, engine_at: EngineAt, until: Until
) -> None:
    async with scripted(2) as servers, engine_at(*servers, late_update_seconds=1.5, probes_until_dead=1) as engine:
        await engine.apply(tensors(1))
        await servers[1].kill()
        await until(lambda: engine.metrics()["live_workers"] == 1)
        go_on = asyncio.Event()

        async def prepare(address: str) -> None:
            await (go_on if address == servers[0].address else asyncio.Event()).wait()

        updating = asyncio.create_task(engine.weights.update(Prepared(policy_version=2, at=prepare)))
        await servers[1].start()
        await until(lambda: engine.metrics()["live_workers"] == 2)
        go_on.set()
        async with asyncio.timeout(60):
            await updating
        assert (engine.policy_version, engine.metrics()["live_workers"]) == (2, 1)
        assert engine.metrics()["weights_bytes"] == 3


@pytest.mark.parametrize("mode", ["abort", "retract"])
async def test_a_server_that_keeps_its_cache_of_older_weights_is_out_where_all_that_ran_was_ended(
    scripted: Any, engine_at: EngineAt, mode: str
) -> None:
    async def refuse(_request: web.Request) -> web.Response:
        return web.Response(status=400, text="not flushed: requests are running")

    async def prepare(_address: str) -> None: ...

    async with scripted() as (server,), engine_at(server, weight_update=mode, probe_interval_seconds=30.0) as engine:
        server.answers["/flush_cache"] = refuse
        update = engine.weights.update(Prepared(policy_version=1, at=prepare))
        if mode == "retract":  # what runs goes on, with a warning
            return await update
        with pytest.raises(EngineUnavailableError, match=r"its weights are new and its cache is not: .* are running"):
            await update


@in_virtual_time
async def test_the_last_server_is_as_late_as_four_times_the_others(scripted: Any, engine_at: EngineAt) -> None:
    async with scripted(2) as servers, engine_at(*servers, late_update_seconds=0.001) as engine:
        servers[0].answers[UPDATE], servers[1].answers[UPDATE] = _taken(servers[0], 1.0), _taken(servers[1], 2.0)
        await engine.apply(tensors(2))
        assert engine.metrics()["live_workers"] == 2


def _taken(server: Any, seconds: float) -> Any:
    async def take(request: web.Request) -> web.Response:
        await asyncio.sleep(seconds)
        server.version = (await request.json())["weight_version"]
        return web.json_response({"success": True})

    return take


@pytest.mark.parametrize("has_one", [True, False])
@in_virtual_time
async def test_after_an_update_that_is_not_waited_for_all_serve_one_version(
    scripted: Any, engine_at: EngineAt, until: Until, has_one: bool
) -> None:
    async with scripted(2) as servers, engine_at(*servers) as engine:
        await engine.apply(tensors(1))
        for server in servers[has_one:]:
            server.update_gate = asyncio.Event()
        updating = asyncio.create_task(engine.apply(tensors(2)))
        await until(lambda: all(len(server.bodies(UPDATE)) == 2 for server in servers))
        await until(lambda: engine.policy_version == 1 + has_one)
        updating.cancel()
        await asyncio.gather(updating, return_exceptions=True)
        await asyncio.sleep(0.15)  # some probes, of servers that still tell the old version
        assert engine.metrics()["live_workers"] == has_one
        for server in servers[has_one:]:
            server.update_gate.set()
        await until(lambda: engine.metrics()["live_workers"] == 2)
        expected = 2 if has_one else 1
        assert engine.policy_version == expected
        assert await versions_answered(engine) == {expected}
        assert {server.version for server in servers} == {str(expected)}


@in_virtual_time
async def test_a_server_that_was_started_again_gets_weights_that_are_called_as_its_first_ones(
    scripted: Any, engine_at: EngineAt, until: Until
) -> None:
    async with scripted(2) as servers, engine_at(*servers, probes_until_dead=1) as engine:
        await engine.apply(tensors(0))  # as a warm-up does
        await servers[1].kill()
        await until(lambda: engine.metrics()["live_workers"] == 1)
        servers[1].version = "default"
        await servers[1].start()
        await until(lambda: engine.metrics()["live_workers"] == 2)
        assert servers[1].version == "0"


async def test_a_server_that_goes_on_calling_its_weights_by_the_old_name_is_out(
    scripted: Any, engine_at: EngineAt
) -> None:
    async with scripted(2) as servers, engine_at(*servers, probe_interval_seconds=30.0) as engine:
        for server in servers:
            server.answers[UPDATE] = _succeed
        with pytest.raises(EngineUnavailableError, match="serves version 0 after an update to 1"):
            await engine.apply(tensors(1))
        assert engine.metrics()["live_workers"] == 0


async def _succeed(_request: web.Request) -> web.Response:
    return web.json_response({"success": True})


async def test_costs_of_the_last_update_are_told(scripted: Any, engine_at: EngineAt) -> None:
    async with scripted(2) as servers, engine_at(*servers) as engine:
        servers[1].answers[UPDATE] = _taken(servers[1], 0.1)
        await engine.apply(tensors(1))
        told = engine.metrics()
        folder = Path(servers[0].bodies(UPDATE)[0]["model_path"])
        assert told["weights_bytes"] == 2 * (folder / "model.safetensors").stat().st_size
        assert told["weights_pause_seconds"] >= 0.1
        assert told["weights_prepare_seconds"] > 0.0


@pytest.mark.parametrize(("mode", "are_stale"), [("in_place", True), ("retract", False), ("abort", False)])
@in_virtual_time
async def test_tokens_decoded_on_keys_and_values_of_older_weights_are_counted(
    engine_at: EngineAt, mode: str, are_stale: bool
) -> None:
    model = {"num_slots": 4, "median_length": 60.0, "max_length": 60, "sigma_between": 0.0, "sigma_within": 0.0}
    async with (
        serve_fake_sglang(mode="time-model", time_model=model, speed=0.2) as fakes,
        engine_at(fakes.address, weight_update=mode) as engine,
    ):
        params = SamplingParams(max_new_tokens=60)
        task = asyncio.create_task(engine.generate(PROMPT, params, request_id="r"))
        await fakes.wait_until(lambda stats: stats["requests"].get("/generate", 0) == 1)
        await asyncio.sleep(0.3)
        await engine.apply(tensors(1))
        completion = await task
        assert {span.policy_version for span in completion.version_spans} == {0, 1}
        stale = engine.metrics()["stale_cache_tokens"]
        num_new = completion.version_spans[-1].end - completion.version_spans[-1].start
        assert 0 <= stale - num_new <= 1 if are_stale else stale == 0
        assert engine.metrics()["stale_cache_share"] == stale / engine.metrics()["sampled_tokens"]
        if mode == "abort":  # it ends what runs by itself
            assert "/abort_request" not in (await fakes.stats())["requests"]


@pytest.mark.parametrize(("mode", "keys"), [("in_place", ["0", "1"]), ("retract", [None, None])])
async def test_new_requests_share_no_keys_and_values_with_those_of_older_weights(
    scripted: Any, engine_at: EngineAt, mode: str, keys: list[str | None]
) -> None:
    async with scripted() as (server,), engine_at(server, weight_update=mode) as engine:
        for version in (0, 1):
            if version:
                await engine.apply(tensors(version))
            await engine.generate(PROMPT, SamplingParams(max_new_tokens=2), request_id="r")
        assert [body.get("extra_key") for body in server.requests] == keys


async def test_weights_that_have_changed_under_a_refusal_are_not_taken_for_the_old_ones(
    scripted: Any, engine_at: EngineAt
) -> None:
    async def refuse(_request: web.Request) -> web.Response:
        message = "Weights were updated, but the cache was not flushed because requests are still running or queued."
        return web.json_response({"success": False, "message": message}, status=400)

    async with scripted() as (server,), engine_at(server, probe_interval_seconds=30.0) as engine:
        server.answers[UPDATE] = refuse
        with pytest.raises(EngineUnavailableError, match="its weights are new and their name is not"):
            await engine.apply(tensors(1))
