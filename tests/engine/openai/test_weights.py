"""Pauses and new weights: at the server where it offers that, with a clear error where not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from rollfeed.errors import EngineProtocolError, EngineUnavailableError
from rollfeed.types import TensorUpdate

PROMPT = np.array([112, 113, 114], np.int32)
RESET = "/reset_prefix_cache?reset_running_requests=true"
TENSORS = {"a": np.ones((2, 2), np.float32)}


def paths(server: Any) -> list[str]:
    return [
        path for path, _ in server.calls if path not in ("/health", "/v1/models", "/weight_info", "/get_world_size")
    ]


async def test_weights_are_written_and_loaded_by_the_server(
    vllm: Any, engine_at: Any, asked: Any, tmp_path: Path
) -> None:
    async with vllm() as server, engine_at(server, weights_folder=str(tmp_path)) as engine:
        assert engine.policy_version == 0
        await engine.apply(TensorUpdate(TENSORS, policy_version=7))
        assert engine.policy_version == 7
        assert paths(server) == ["/pause?mode=abort", "/collective_rpc", RESET, "/resume"]
        (body,) = [body for path, body in server.calls if path == "/collective_rpc"]
        assert body["method"] == "reload_weights"
        written = load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors")
        np.testing.assert_array_equal(written["a"], TENSORS["a"])
        completion = await engine.generate(PROMPT, asked(), request_id="a")
        assert [span.policy_version for span in completion.version_spans] == [7]
        assert engine.counters.weight_updates == 1


async def test_what_runs_goes_on_with_the_new_weights_and_its_spans_say_so(
    vllm: Any, engine_at: Any, asked: Any, rescored: Any, until: Any
) -> None:
    async with vllm() as server, engine_at(server) as engine:
        server.hold_after = 2
        task = asyncio.create_task(engine.generate(PROMPT, asked(), request_id="a"))
        await until(lambda: engine.metrics()["tokens_in_flight"] == 2)
        server.hold_after = None
        await engine.apply(TensorUpdate(TENSORS, policy_version=1))
        completion = await task
        assert [tuple(span) for span in completion.version_spans] == [(0, 2, 0), (2, 6, 1)]
        expected = rescored(PROMPT.tolist(), completion.token_ids.tolist())
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)
        await until(lambda: server.closed == 1)


async def test_without_streaming_what_runs_starts_again_with_the_new_weights(
    vllm: Any, engine_at: Any, asked: Any, until: Any
) -> None:
    async with vllm() as server, engine_at(server, stream=False) as engine:
        server.hold_after = 2
        task = asyncio.create_task(engine.generate(PROMPT, asked(), request_id="a"))
        await until(lambda: server.holding == 1)
        server.hold_after = None
        await engine.apply(TensorUpdate(TENSORS, policy_version=1))
        assert [tuple(span) for span in (await task).version_spans] == [(0, 6, 1)]


async def test_a_server_without_such_routes_keeps_its_weights(vllm: Any, engine_at: Any, asked: Any) -> None:
    async with vllm(has_dev_routes=False) as server, engine_at(server) as engine:
        with pytest.raises(EngineProtocolError, match="start vLLM with VLLM_SERVER_DEV_MODE=1"):
            await engine.apply(TensorUpdate(TENSORS, policy_version=1))
        assert engine.policy_version == 0
        assert len((await engine.generate(PROMPT, asked(), request_id="a")).token_ids) == 6


async def test_a_refused_update_leaves_the_old_weights(vllm: Any, engine_at: Any, asked: Any) -> None:
    async with vllm(update_status=400) as server, engine_at(server) as engine:
        with pytest.raises(EngineProtocolError, match="/collective_rpc: HTTP 400"):
            await engine.apply(TensorUpdate(TENSORS, policy_version=1))
        assert paths(server)[-1] == "/resume"
        completion = await engine.generate(PROMPT, asked(), request_id="a")
        assert [span.policy_version for span in completion.version_spans] == [0]


@pytest.mark.parametrize("failing", [{"update_status": 500}, {"reset_status": 500}, {"reset_status": 404}])
async def test_after_an_update_whose_end_is_not_known_nothing_is_sent_until_one_succeeds(
    vllm: Any, engine_at: Any, asked: Any, failing: dict[str, int]
) -> None:
    async with vllm(**failing) as server, engine_at(server) as engine:
        with pytest.raises((EngineUnavailableError, EngineProtocolError)):
            await engine.apply(TensorUpdate(TENSORS, policy_version=1))
        for asking in (engine.generate(PROMPT, asked(), request_id="a"), engine.health()):
            with pytest.raises(EngineUnavailableError, match="its weights are not known since an update failed"):
                await asking
        assert server.bodies == []
        server.update_status = server.reset_status = 200
        await engine.apply(TensorUpdate(TENSORS, policy_version=1))
        completion = await engine.generate(PROMPT, asked(), request_id="a")
        assert [span.policy_version for span in completion.version_spans] == [1]


async def test_a_pause_is_the_servers_where_it_has_one(vllm: Any, engine_at: Any, asked: Any, until: Any) -> None:
    async with vllm() as server, engine_at(server) as engine:
        server.hold_after = 2
        running = asyncio.create_task(engine.generate(PROMPT, asked(), request_id="a"))
        await until(lambda: engine.metrics()["tokens_in_flight"] == 2)
        await engine.pause()
        waiting = asyncio.create_task(engine.generate(PROMPT, asked(), request_id="b"))
        await asyncio.sleep(0)
        assert paths(server) == ["/pause?mode=keep"]
        assert await engine.load() == (1, 1)
        server.release.set()
        await engine.resume()
        assert paths(server)[-1] == "/resume"
        assert [len(each.token_ids) for each in await asyncio.gather(running, waiting)] == [6, 6]
        assert server.closed == 0


async def test_elsewhere_a_pause_ends_requests_here_and_they_go_on_from_their_tokens(
    vllm: Any, engine_at: Any, asked: Any, until: Any
) -> None:
    async with vllm(has_dev_routes=False) as server, engine_at(server) as engine:
        server.hold_after = 2
        running = asyncio.create_task(engine.generate(PROMPT, asked(), request_id="a"))
        await until(lambda: engine.metrics()["tokens_in_flight"] == 2)
        await engine.pause()
        await until(lambda: server.closed == 1)
        assert await engine.load() == (0, 1)
        server.hold_after = None
        await engine.resume()
        assert len((await running).token_ids) == 6
        assert len(server.bodies[-1]["token_ids"]) == len(PROMPT) + 2


async def test_a_paused_request_can_be_aborted(vllm: Any, engine_at: Any, asked: Any, until: Any) -> None:
    async with vllm(has_dev_routes=False) as server, engine_at(server) as engine:
        server.hold_after = 2
        running = asyncio.create_task(engine.generate(PROMPT, asked(), request_id="a"))
        await until(lambda: engine.metrics()["tokens_in_flight"] == 2)
        await engine.pause()
        await engine.abort("a")
        assert len((await running).token_ids) == 2


async def test_an_update_during_a_pause_leaves_it_paused(vllm: Any, engine_at: Any, asked: Any) -> None:
    async with vllm() as server, engine_at(server) as engine:
        await engine.pause()
        await engine.apply(TensorUpdate(TENSORS, policy_version=3))
        assert "/resume" not in paths(server)
        waiting = asyncio.create_task(engine.generate(PROMPT, asked(), request_id="a"))
        await asyncio.sleep(0)
        assert server.bodies == []
        await engine.resume()
        assert [span.policy_version for span in (await waiting).version_spans] == [3]
