"""Tensors of this process for real servers of the embedded engine, and what servers are never sent."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollfeed.base.tensor_buckets import bucket_text, make_buckets
from rollfeed.engine.client import ServerEngine
from rollfeed.errors import EngineProtocolError, EngineUnavailableError
from rollfeed.protocols import MetServer, TransportContext
from rollfeed.types import SamplingParams, TensorUpdate
from rollfeed.weights.transports import TRANSPORTS
from rollfeed.weights.transports.tensors import TensorTransport, VLLMTensors, check_is_here, shared_bucket

PROMPT = np.array([70, 71, 72], np.int32)
GREEDY = SamplingParams(max_new_tokens=16, temperature=0.0)
EngineOf = Callable[..., ServerEngine]


def perturbed(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return {name: each + 0.3 * torch.randn(each.shape, generator=random) for name, each in tensors.items()}


async def said(engine: ServerEngine) -> tuple[list[int], list[float], set[int]]:
    completion = await engine.generate(PROMPT, GREEDY, request_id="r")
    versions = {span.policy_version for span in completion.version_spans}
    return completion.token_ids.tolist(), completion.logprobs.tolist(), versions


@pytest.mark.parametrize("name", ["tensors", "nccl"])
async def test_new_weights_arrive_as_by_a_folder_and_the_old_ones_come_back_bit_for_bit(
    name: str, server: Any, engine_of: EngineOf, context: TransportContext, tiny_checkpoint: Path
) -> None:
    old = load_file(tiny_checkpoint / "model.safetensors")
    new = perturbed(old)
    async with engine_of(server.address, transport=TRANSPORTS["disk"](context)) as engine:
        first = engine.policy_version + 1
        await engine.apply(TensorUpdate(old, policy_version=first))
        before = await said(engine)
        await engine.apply(TensorUpdate(new, policy_version=first + 1))
        by_folder = await said(engine)
        await engine.apply(TensorUpdate(old, policy_version=first + 2))
    async with engine_of(server.address, transport=TRANSPORTS[name](context)) as engine:
        await engine.apply(TensorUpdate(new, policy_version=first + 3))
        between = await said(engine)
        assert between[:2] == by_folder[:2]
        assert between[2] == {first + 3}
        assert between[0] != before[0]
        await engine.apply(TensorUpdate(old, policy_version=first + 4))
        assert await said(engine) == (*before[:2], {first + 4})
        assert engine.metrics()["weight_updates"] == 2


@pytest.mark.parametrize("name", ["tensors", "nccl"])
@pytest.mark.parametrize("change", ["unknown", "missing", "shape", "none"])
async def test_what_does_not_fit_is_refused_before_a_server_is_told(
    name: str, change: str, context: TransportContext, tiny_checkpoint: Path
) -> None:
    tensors = load_file(tiny_checkpoint / "model.safetensors")
    if change == "unknown":
        tensors["model.layers.0.mlp.new.weight"] = torch.zeros(2)
    elif change == "missing":
        del tensors["model.layers.1.mlp.up_proj.weight"]
    elif change == "shape":
        tensors["model.norm.weight"] = torch.zeros(3)
    else:
        tensors = {}
    expected = {
        "unknown": r"'model\.layers\.0\.mlp\.new\.weight' is none that servers",
        "missing": r"'model\.layers\.1\.mlp\.up_proj\.weight' is missing",
        "shape": r"'model\.norm\.weight' has the shape \(3,\)",
        "none": "there are none",
    }
    transport = TRANSPORTS[name](context)
    with pytest.raises(EngineProtocolError, match=f"weights of version 4 do not fit: .*{expected[change]}"):
        await transport.stage(TensorUpdate(tensors, policy_version=4))


def test_a_server_of_another_model_is_refused_when_it_is_met(context: TransportContext, tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EngineProtocolError, match=r"http://a:1: serves .*'model\.norm\.weight' has the shape \(3,\)"):
        TensorTransport(context).meet([MetServer("http://a:1", model_path=str(tmp_path))])


async def test_without_weights_here_the_form_is_that_of_a_server_on_this_host(
    context: TransportContext, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    transport = TensorTransport(replace(context, checkpoint=tmp_path))
    with_unknown = TensorUpdate({"w": torch.zeros(2)}, policy_version=1)
    await transport.stage(with_unknown)
    transport.meet([MetServer("http://a:1"), MetServer("http://b:1", model_path=str(tiny_checkpoint))])
    with pytest.raises(EngineProtocolError, match="'w' is none"):
        await transport.stage(with_unknown)


@pytest.mark.parametrize("is_tied", [True, False])
async def test_a_stored_head_that_is_not_given_is_the_embeddings_where_it_is_tied_to_them(
    is_tied: bool, context: TransportContext, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    tensors = load_file(tiny_checkpoint / "model.safetensors")
    embeddings = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embeddings.clone()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": is_tied}))
    transport = TensorTransport(replace(context, checkpoint=None))
    transport.meet([MetServer(ADDRESS, model_path=str(tmp_path))])
    update = TensorUpdate(tensors, policy_version=1)
    if not is_tied:
        with pytest.raises(EngineProtocolError, match=r"'lm_head\.weight' is missing"):
            await transport.stage(update)
        return
    staged: Any = await transport.stage(update)
    sent = {name: each for bucket in staged.buckets for name, each in bucket.tensors().items()}
    assert torch.equal(sent["lm_head.weight"], embeddings)
    assert sent.keys() == {*tensors, "lm_head.weight"}


class Recorder:
    """Stands where a server is: keeps commands, and answers some of them with an error."""

    def __init__(self, **errors: list[EngineProtocolError | EngineUnavailableError | None]) -> None:
        self.calls: list[tuple[str, Any]] = []
        self._errors = errors

    async def __call__(self, path: str, body: Any) -> Mapping[str, Any]:
        self.calls.append((path, body))
        left = self._errors.get(path.strip("/"), [])
        if left and (error := left.pop(0)) is not None:
            raise error
        return {"success": True}

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]


def refusal(status: int = 400) -> EngineProtocolError:
    error = EngineProtocolError("refused")
    error.status = status
    return error


async def staged(context: TransportContext, folder: Path, num_ranks: int = 1) -> Any:
    transport = TensorTransport(context)
    transport.meet([MetServer("http://127.0.0.1:1", num_ranks)])
    return await transport.stage(TensorUpdate(load_file(folder / "model.safetensors"), policy_version=7))


ADDRESS = "http://127.0.0.1:1"


async def test_every_rank_has_its_text_and_the_last_bucket_the_version(
    context: TransportContext, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollfeed.weights.transports.staging._INLINE_BYTES", 20_000)
    update, server = await staged(context, tiny_checkpoint, num_ranks=2), Recorder()
    assert await update.load(ADDRESS, server) > 0
    sent = [body for path, body in server.calls if path == "/update_weights_from_tensor"]
    assert len(sent) > 2
    assert {len(body["serialized_named_tensors"]) for body in sent} == {2}
    assert [body.get("weight_version") for body in sent] == [None] * (len(sent) - 1) + ["7"]
    assert {body["load_format"] for body in sent} == {"flattened_bucket"}
    assert not any(body["flush_cache"] for body in sent)
    assert server.paths[0] == "/begin_weight_update"
    assert server.paths[-1] == "/end_weight_update"


async def test_a_server_without_sessions_is_sent_tensors_alone(
    context: TransportContext, tiny_checkpoint: Path
) -> None:
    server = Recorder(begin_weight_update=[refusal(404)])
    await (await staged(context, tiny_checkpoint)).load(ADDRESS, server)
    assert server.paths == ["/begin_weight_update", "/update_weights_from_tensor"]


async def test_a_session_that_somebody_left_open_is_ended_first(
    context: TransportContext, tiny_checkpoint: Path
) -> None:
    server = Recorder(begin_weight_update=[refusal()])
    await (await staged(context, tiny_checkpoint)).load(ADDRESS, server)
    begin, end = "/begin_weight_update", "/end_weight_update"
    assert server.paths == [begin, end, begin, "/update_weights_from_tensor", end]


@pytest.mark.parametrize(
    ("errors", "raised"),
    [
        ({"update_weights_from_tensor": [refusal()]}, EngineProtocolError),
        ({"update_weights_from_tensor": [None, refusal()]}, EngineUnavailableError),
        ({"update_weights_from_tensor": [EngineUnavailableError("gone")]}, EngineUnavailableError),
        ({"end_weight_update": [refusal()]}, EngineUnavailableError),
    ],
)
async def test_a_session_is_always_ended_and_what_is_half_done_is_not_called_refused(
    errors: dict[str, Any],
    raised: type[Exception],
    context: TransportContext,
    tiny_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollfeed.weights.transports.staging._INLINE_BYTES", 20_000)
    update, server = await staged(context, tiny_checkpoint), Recorder(**errors)
    with pytest.raises(raised):
        await update.load(ADDRESS, server)
    assert server.paths[-1] == "/end_weight_update"


async def test_vllm_reads_tensors_of_a_gpu_only(context: TransportContext, tiny_checkpoint: Path) -> None:
    with pytest.raises(EngineProtocolError, match=r'reads tensors of a GPU only.*weights_transport = "disk"'):
        await staged(replace(context, kind="openai"), tiny_checkpoint)
    with pytest.raises(EngineProtocolError, match=r"spread over 2 GPUs.*nccl"):
        await staged(replace(context, kind="openai"), tiny_checkpoint, num_ranks=2)


async def test_the_phases_of_vllm_have_their_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"a": torch.ones(2, 3).bfloat16(), "b": torch.zeros(1)}
    buckets = tuple(make_buckets(given.items(), most_bytes=1))

    class Gpu:
        uuid = "GPU-1"

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: Gpu)
    monkeypatch.setattr("torch.multiprocessing.reductions.reduce_tensor", lambda bytes_B: (None, (len(bytes_B), 5)))
    update, server = VLLMTensors(buckets, policy_version=3), Recorder()
    await update.prepare(ADDRESS, server)
    assert await update.load(ADDRESS, server) == 16
    assert server.calls[0] == ("/init_weight_transfer_engine", {"init_info": {"packed": True}})
    assert server.paths[1:] == ["/start_weight_update", *["/update_weights"] * 2, "/finish_weight_update"]
    assert server.calls[-1][1] == {"weight_version": "3"}
    info = server.calls[3][1]["update_info"]
    handles = pickle.loads(base64.b64decode(info.pop("ipc_handles_pickled")))
    assert handles == {"GPU-1": (12, 5)}
    assert info == {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]], "tensor_sizes": [12]}
    assert shared_bucket(buckets[0])["tensor_sizes"] == [4]
    start, finish = "/start_weight_update", "/finish_weight_update"
    failing = Recorder(update_weights=[refusal()])
    with pytest.raises(EngineUnavailableError, match="its weights are not known"):
        await update.load(ADDRESS, failing)
    assert failing.calls[-1] == (finish, None)
    already, unavailable = EngineUnavailableError("HTTP 500: already active"), EngineUnavailableError("no answer")
    already.status = 500
    left_open = Recorder(start_weight_update=[already])
    await update.load(ADDRESS, left_open)
    assert left_open.calls[:3] == [(start, None), (finish, None), (start, None)]
    assert left_open.calls[-1][1] == {"weight_version": "3"}
    silent = Recorder(start_weight_update=[unavailable])
    with pytest.raises(EngineUnavailableError, match="no answer"):
        await update.load(ADDRESS, silent)
    assert silent.paths == [start]
    unready = Recorder(init_weight_transfer_engine=[EngineUnavailableError("Weight transfer not configured")])
    with pytest.raises(EngineUnavailableError, match=r"not configured: start vLLM .*ipc"):
        await update.prepare(ADDRESS, unready)


def test_a_handle_goes_to_this_host_only() -> None:
    check_is_here("http://127.0.0.1:1")
    check_is_here("http://localhost:1")
    with pytest.raises(EngineProtocolError, match=r"http://192\.0\.2\.1:1: is not on this host"):
        check_is_here("http://192.0.2.1:1")


async def test_the_embedded_server_takes_a_session_whole_or_not_at_all(
    server: Any, engine_of: EngineOf, context: TransportContext, tiny_checkpoint: Path
) -> None:
    tensors = load_file(tiny_checkpoint / "model.safetensors")
    name = "model.norm.weight"

    async def bucket(**changes: Any) -> dict[str, Any]:
        (made,) = make_buckets([(name, changes.pop("tensor", tensors[name] * 7))], most_bytes=1)
        return {"serialized_named_tensors": [bucket_text(made)], "load_format": "flattened_bucket", **changes}

    async with engine_of(server.address, transport=TRANSPORTS["tensors"](context)) as engine:
        ask, address = engine._http.ask, server.address
        before = await said(engine)
        with pytest.raises(EngineProtocolError, match="must run between"):
            await ask(address, "/update_weights_from_tensor", await bucket())
        with pytest.raises(EngineProtocolError, match="no weight-update session is open"):
            await ask(address, "/end_weight_update", {})
        await ask(address, "/begin_weight_update", {})
        with pytest.raises(EngineProtocolError, match="already open"):
            await ask(address, "/begin_weight_update", {})
        with pytest.raises(EngineProtocolError, match="no bucket of tensors"):
            await ask(address, "/update_weights_from_tensor", {**await bucket(), "serialized_named_tensors": ["x"]})
        await ask(address, "/update_weights_from_tensor", await bucket())
        await ask(address, "/end_weight_update", {})  # none of them had a version
        assert await said(engine) == before
        await ask(address, "/begin_weight_update", {})
        body = await bucket(weight_version="9999", tensor=torch.zeros(3))
        with pytest.raises(EngineProtocolError, match="no weight of this name and shape"):
            await ask(address, "/update_weights_from_tensor", body)
        assert await said(engine) == before
