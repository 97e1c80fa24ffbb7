"""Broadcasts: a group for each server, kept while it certainly holds, and what becomes of failures."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.weights.transports.stumbling import stumbling

from rollfeed.base.tensor_buckets import make_buckets
from rollfeed.errors import EngineProtocolError, EngineUnavailableError
from rollfeed.protocols import Command, TransportContext
from rollfeed.types import SamplingParams, TensorUpdate
from rollfeed.weights.transports.nccl import (
    BUCKET_BYTES,
    BroadcastTransport,
    Link,
    Sender,
    SGLangBroadcast,
    VLLMBroadcast,
    both,
    own_host,
)
from rollfeed.weights.transports.staging import Staging

ADDRESS = "http://127.0.0.1:1"
BUCKETS = tuple(make_buckets({"a": torch.ones(2, 3), "b": torch.zeros(4)}.items(), most_bytes=1))


@dataclass
class KeptSender:
    """Keeps what it sends; one that is given a time to hang hangs."""

    sent: list[int] = field(default_factory=list)
    is_left: bool = False
    hanging: threading.Event | None = None

    def broadcast(self, bytes_B: torch.Tensor) -> None:
        if self.hanging is not None:
            self.hanging.wait(30.0)
        self.sent.append(len(bytes_B))

    def leave(self) -> None:
        self.is_left = True


class Joined(SGLangBroadcast):
    """Makes no real groups."""

    made: ClassVar[list[KeptSender]] = []

    async def _join(self, address: str, command: Command, name: str) -> Sender:
        await command("/init_weights_update_group", {"group_name": name})
        self.made.append(KeptSender())
        return self.made[-1]


class JoinedVLLM(VLLMBroadcast):
    async def _join(self, address: str, command: Command, name: str) -> Sender:
        return KeptSender()


class Server:
    """Keeps commands, and refuses those that it is told to."""

    def __init__(self, *refused: str) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.left_by_then: list[bool] = []
        """For each call, whether the newest sender had left its group."""
        self._refused = refused

    async def __call__(self, path: str, body: Any) -> Mapping[str, Any]:
        self.calls.append((path, body))
        self.left_by_then.append(bool(Joined.made) and Joined.made[-1].is_left)
        if path in self._refused:
            raise EngineProtocolError(f"{path} is refused")
        return {"success": True}

    def count(self, path: str) -> int:
        return sum(called == path for called, _ in self.calls)


@pytest.fixture
def staging(context: TransportContext) -> Staging:
    return Staging(replace(context, checkpoint=None))


def update_of(links: dict[str, Link], staging: Staging, number: int, kind: Any = Joined) -> Any:
    return kind(staging, links, BUCKETS, number, policy_version=10 + number)


async def test_a_group_is_kept_until_a_server_may_be_another_one(staging: Staging) -> None:
    links: dict[str, Link] = {}
    server = Server()
    joined, left = "/init_weights_update_group", "/destroy_weights_update_group"
    for number in (1, 2):
        update = update_of(links, staging, number)
        await update.prepare(ADDRESS, server)
        await update.load(ADDRESS, server)
    assert (server.count(joined), server.count(left)) == (1, 0)
    # It was taken out between the two, or after both, and is given the same update again.
    update = update_of(links, staging, 3)
    await update.prepare(ADDRESS, server)
    assert (server.count(joined), server.count(left)) == (1, 0)
    await update.prepare(ADDRESS, server)
    assert (server.count(joined), server.count(left)) == (2, 1)
    await update.load(ADDRESS, server)
    await update.prepare(ADDRESS, server)
    assert (server.count(joined), server.count(left)) == (3, 2)
    await update.load(ADDRESS, server)
    # It was away while the fourth was published.
    update = update_of(links, staging, 5)
    await update.prepare(ADDRESS, server)
    assert (server.count(joined), server.count(left)) == (4, 3)
    assert Joined.made[-1].is_left is False
    assert Joined.made[-2].is_left is True
    await update.load(ADDRESS, server)
    bodies = [body for path, body in server.calls if path == "/update_weights_from_distributed"]
    assert [body.get("weight_version") for body in bodies] == [
        None,
        "11",
        None,
        "12",
        None,
        "13",
        None,
        "13",
        None,
        "15",
    ]
    assert bodies[0]["names"] == ("a",)
    assert bodies[0]["dtypes"] == ["float32"]
    assert Joined.made[-1].sent == [24, 16]


async def test_a_broadcast_that_a_server_refuses_ends_at_once_and_its_group_too(staging: Staging) -> None:
    links: dict[str, Link] = {}
    server = Server("/update_weights_from_distributed")
    update = update_of(links, staging, 1)
    await update.prepare(ADDRESS, server)
    sender = Joined.made[-1]
    sender.hanging = threading.Event()
    async with asyncio.timeout(60):
        with pytest.raises(EngineUnavailableError, match=r"its weights are not known: .* is refused"):
            await update.load(ADDRESS, server)
    sender.hanging.set()
    assert sender.is_left
    assert not links
    assert [path for path, _ in server.calls[-2:]] == ["/end_weight_update", "/destroy_weights_update_group"]
    # A server that waits for the broadcast answers nothing before.
    assert server.left_by_then[-3:] == [False, True, True]


async def test_a_session_that_cannot_be_opened_leaves_the_old_weights(staging: Staging) -> None:
    links: dict[str, Link] = {}
    server = Server("/begin_weight_update")
    update = update_of(links, staging, 1)
    await update.prepare(ADDRESS, server)
    with pytest.raises(EngineProtocolError, match="begin_weight_update is refused"):
        await update.load(ADDRESS, server)


@pytest.mark.parametrize("error", [RuntimeError("no port"), OSError(101, "Network is unreachable")])
async def test_a_group_that_cannot_be_made_here_costs_that_server_alone(
    staging: Staging, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("rollfeed.weights.transports.nccl.listen", fail)
    links: dict[str, Link] = {}
    with pytest.raises(EngineUnavailableError, match=f"{ADDRESS}: no group for broadcasts: .*{error.args[-1]}"):
        await update_of(links, staging, 1, SGLangBroadcast).prepare(ADDRESS, Server())
    assert not links


async def test_vllm_is_told_of_all_tensors_at_once(staging: Staging) -> None:
    links: dict[str, Link] = {}
    server = Server()
    update = update_of(links, staging, 1, JoinedVLLM)
    await update.prepare(ADDRESS, server)
    assert await update.load(ADDRESS, server) == 40
    assert [path for path, _ in server.calls] == ["/start_weight_update", "/update_weights", "/finish_weight_update"]
    assert server.calls[1][1]["update_info"] == {
        "names": ["a", "b"],
        "dtype_names": ["float32", "float32"],
        "shapes": [(2, 3), (4,)],
    }
    assert server.calls[2][1] == {"weight_version": "11"}
    sender: Any = links[ADDRESS].sender
    assert sender.sent == [24, 16]
    with pytest.raises(EngineUnavailableError, match="its weights are not known"):
        await update.load(ADDRESS, Server("/finish_weight_update"))
    assert not links
    await update.prepare(ADDRESS, server)
    refusing: Any = Server("/update_weights")
    sender = links[ADDRESS].sender
    with pytest.raises(EngineUnavailableError, match="its weights are not known"):
        await update.load(ADDRESS, refusing)
    assert [path for path, _ in refusing.calls[-2:]] == ["/finish_weight_update", "/shutdown_weight_transfer_engine"]
    assert sender.is_left


def test_buckets_are_cut_where_the_receiver_of_vllm_cuts_them() -> None:
    tensors = {str(index): torch.zeros(size, dtype=torch.uint8) for index, size in enumerate([5, 6, 1, 9, 12, 3])}
    cut = [bucket.names for bucket in make_buckets(tensors.items(), most_bytes=10)]
    # vLLM adds tensors until there are more than the most bytes; BUCKET_BYTES is what it is told.
    expected: list[list[str]] = [[]]
    total = 0
    for name, tensor in tensors.items():
        expected[-1].append(name)
        total += tensor.nbytes
        if total > 10:
            expected, total = [*expected, []], 0
    assert [list(names) for names in cut] == [names for names in expected if names]
    assert BUCKET_BYTES == 1 << 28


async def test_what_fails_here_says_so() -> None:
    def fail() -> None:
        raise RuntimeError("Connection closed\nby peer")

    server = asyncio.Event()
    with pytest.raises(EngineUnavailableError, match="http://a:1: broadcast failed: Connection closed by peer"):
        await both(fail, server.wait(), of="http://a:1")


async def test_a_processor_has_nothing_for_vllm(context: TransportContext, tiny_checkpoint: Path) -> None:
    update = TensorUpdate(load_file(tiny_checkpoint / "model.safetensors"), policy_version=1)
    with pytest.raises(EngineProtocolError, match="receives tensors of a GPU only"):
        await BroadcastTransport(replace(context, kind="openai")).stage(update)


def test_a_server_reaches_this_process_where_this_process_reaches_it() -> None:
    assert own_host("http://127.0.0.1:5") == "127.0.0.1"


async def test_a_server_that_a_broadcast_did_not_reach_wholly_is_given_it_again(
    server: Any, engine_of: Any, context: TransportContext, tiny_checkpoint: Path
) -> None:
    tensors = load_file(tiny_checkpoint / "model.safetensors")
    transport = BroadcastTransport(context)
    changes = {"probes_until_dead": 1, "max_tries": 1000, "request_timeout_seconds": 60.0}
    async with engine_of(server.address, transport=transport, **changes) as engine:
        version = engine.policy_version + 1
        update = await stumbling(transport, TensorUpdate(tensors, policy_version=version))
        with pytest.raises(EngineUnavailableError, match="a cable was pulled"):
            await engine.apply(update)
        params = SamplingParams(max_new_tokens=8, temperature=0.0)
        after = await engine.generate(np.array([70, 71], np.int32), params, request_id="after")
        assert {span.policy_version for span in after.version_spans} == {version}


async def test_a_server_that_was_killed_comes_back_in_a_new_group(
    server: Any, engine_of: Any, context: TransportContext, tiny_checkpoint: Path
) -> None:
    tensors = load_file(tiny_checkpoint / "model.safetensors")
    tensors = {name: each * 1.5 for name, each in tensors.items()}
    prompt, greedy = np.array([70, 71, 72], np.int32), SamplingParams(max_new_tokens=8, temperature=0.0)
    changes = {"probes_until_dead": 1, "max_tries": 1000, "request_timeout_seconds": 300.0}
    async with engine_of(server.address, transport=BroadcastTransport(context), **changes) as engine:
        version = engine.policy_version + 1
        await engine.apply(TensorUpdate(tensors, policy_version=version))
        before = await engine.generate(prompt, greedy, request_id="before")
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        after = await engine.generate(prompt, greedy, request_id="after")
        assert {span.policy_version for span in after.version_spans} == {version}
        assert after.logprobs.tolist() == before.logprobs.tolist()
        await engine.apply(TensorUpdate(tensors, policy_version=version + 1))
        body = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "group_name": "x"}
        with pytest.raises(EngineProtocolError, match="takes the backend gloo only"):
            await engine._http.ask(server.address, "/init_weights_update_group", body)
