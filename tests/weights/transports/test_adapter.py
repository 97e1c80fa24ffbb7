"""Adapters alone: what is written, what servers are told, and what they are started with."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollfeed.config.launch import LaunchSettings
from rollfeed.config.lora import LoraSettings
from rollfeed.config.train import TrainSettings
from rollfeed.engine.launch import KINDS, LaunchedModel, server_commands
from rollfeed.errors import EngineProtocolError, EngineUnavailableError
from rollfeed.protocols import TransportContext
from rollfeed.training.trainer import Trainer
from rollfeed.types import TensorUpdate
from rollfeed.weights import TRANSPORTS

ALL = "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj"


class Server:
    """Takes commands, and refuses those on some paths."""

    def __init__(self, *refused: str) -> None:
        self.told: list[tuple[str, Any]] = []
        self._refused = refused

    async def __call__(self, path: str, body: Any) -> dict[str, Any]:
        self.told.append((path, body))
        if path in self._refused:
            raise EngineProtocolError(f"{path}: refused")
        return {}


@pytest.fixture(scope="module")
def trainer(tiny_checkpoint: Path) -> Trainer:
    settings = TrainSettings(device="cpu", threads=1, lora={"rank": 2, "target_modules": ["q_proj"]})
    return Trainer(tiny_checkpoint, settings=settings, temperature=1.0, num_batches=1, max_response_length=8)


def transport_for(kind: str, checkpoint: Path, folder: Path | None = None) -> Any:
    return TRANSPORTS["adapter"](
        TransportContext(kind=kind, folder=folder, checkpoint=checkpoint, untied_head=kind == "openai")
    )


def test_sglang_lets_the_last_adapter_go_and_is_told_the_version(trainer: Trainer, tiny_checkpoint: Path) -> None:
    transport, server = transport_for("sglang", tiny_checkpoint), Server("/unload_lora_adapter")
    update = asyncio.run(transport.stage(TensorUpdate(trainer.weights(), policy_version=7)))
    moved = asyncio.run(update.load("http://there", server))
    name = {"lora_name": update.adapter_name}
    assert server.told == [
        ("/unload_lora_adapter", name),
        ("/load_lora_adapter", {**name, "lora_path": str(update.folder)}),
        ("/update_weight_version", {"new_version": "7"}),
    ]
    written = load_file(update.folder / "adapter_model.safetensors")
    assert all(torch.equal(each, written[name]) for name, each in trainer.adapter.adapter().items())
    assert 0 < sum(each.nbytes for each in written.values()) < moved < 50_000
    transport.close()
    assert not update.folder.exists()


def test_vllm_takes_each_adapter_from_a_folder_of_its_own(trainer: Trainer, tiny_checkpoint: Path) -> None:
    transport, server = transport_for("openai", tiny_checkpoint), Server()
    weights = TensorUpdate(trainer.weights(), policy_version=1)
    updates = [asyncio.run(transport.stage(weights)) for _ in range(3)]
    for update in updates[1:]:
        asyncio.run(update.load("http://there", server))
    assert [path for path, _ in server.told] == ["/v1/load_lora_adapter"] * 2
    assert [body["lora_path"] for _, body in server.told] == [str(update.folder) for update in updates[1:]]
    assert all(body["load_inplace"] for _, body in server.told)
    assert not updates[0].folder.exists()  # two are kept, for a server that comes back late
    transport.close()


@pytest.mark.parametrize(
    ("kind", "refused", "error", "said"),
    [
        ("openai", "/v1/load_lora_adapter", EngineProtocolError, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 --enable-lora"),
        ("sglang", "/load_lora_adapter", EngineUnavailableError, "start SGLang with --enable-lora"),
        ("sglang", "/update_weight_version", EngineUnavailableError, "start SGLang with --enable-lora"),
    ],
)
def test_a_server_without_adapters_is_told_of_with_its_flags(
    kind: str, refused: str, error: type[Exception], said: str, trainer: Trainer, tiny_checkpoint: Path
) -> None:
    transport = transport_for(kind, tiny_checkpoint)
    update = asyncio.run(transport.stage(TensorUpdate(trainer.weights(), policy_version=1)))
    with pytest.raises(error, match=said):
        asyncio.run(update.load("http://there", Server(refused)))
    transport.close()


def test_weights_without_an_adapter_are_refused(tiny_checkpoint: Path) -> None:
    transport = transport_for("sglang", tiny_checkpoint)
    with pytest.raises(EngineProtocolError, match=r"train\.lora trains, and these weights have no adapter"):
        asyncio.run(transport.stage(TensorUpdate({"weight": torch.ones(1)}, policy_version=1)))


def test_an_adapter_that_cannot_be_written_leaves_nothing(
    trainer: Trainer, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    transport = transport_for("sglang", tiny_checkpoint, tmp_path / "weights")
    blocked = transport._home.path / "adapter-1-1"
    blocked.write_text("a file where the folder should be")
    with pytest.raises(EngineProtocolError, match="adapter of version 1 cannot be written"):
        asyncio.run(transport.stage(TensorUpdate(trainer.weights(), policy_version=1)))
    transport.close()


@pytest.mark.parametrize(
    ("kind", "modules", "expected"),
    [
        ("openai", "all-linear", f"--enable-lora --max-lora-rank 16 --lora-target-modules {ALL}"),
        ("sglang", "all-linear", f"--enable-lora --max-lora-rank 12 --lora-target-modules {ALL}"),
        ("sglang", ["q_proj", "o_proj"], "--enable-lora --max-lora-rank 12 --lora-target-modules q_proj o_proj"),
    ],
)
def test_servers_are_started_with_what_adapters_need(
    kind: str, modules: Any, expected: str, tiny_checkpoint: Path
) -> None:
    lora = LoraSettings(rank=12, target_modules=modules)
    settings = LaunchSettings(command=[sys.executable, "-m", "server"], num_servers=1)
    for transport in ("adapter", "disk"):
        model = LaunchedModel(tiny_checkpoint, "policy", 512, weights_transport=transport, lora=lora)
        [command] = server_commands(settings, KINDS[kind], model)
        assert (expected in " ".join(command.words)) is (transport == "adapter")
        assert ("VLLM_ALLOW_RUNTIME_LORA_UPDATING" in command.environment) is (
            transport == "adapter" and kind == "openai"
        )


@pytest.mark.parametrize(
    "layers",
    [
        ("mlp.gate.weight", "mlp.experts.0.gate_proj.weight", "mlp.experts.1.down_proj.weight"),
        ("mlp.router.weight", "mlp.experts.gate_up_proj_blocks"),  # as gpt-oss has them
    ],
    ids=["experts apart", "experts together"],
)
def test_servers_of_a_mixture_are_told_the_layers_beside_its_experts(tmp_path: Path, layers: tuple[str, ...]) -> None:
    adapted = ("self_attn.q_proj.weight", "mlp.up_proj.weight")
    names = ["model.embed_tokens.weight", "lm_head.weight", *(f"model.layers.0.{each}" for each in (*adapted, *layers))]
    save_file({name: torch.zeros(2, 2) for name in names}, tmp_path / "model.safetensors")
    model = LaunchedModel(tmp_path, "policy", 512, weights_transport="adapter", lora=LoraSettings())
    settings = LaunchSettings(command=[sys.executable, "-m", "server"], num_servers=1)
    [command] = server_commands(settings, KINDS["sglang"], model)
    at = command.words.index("--lora-target-modules")
    assert list(command.words[at + 1 : at + 3]) == ["q_proj", "up_proj"]
    assert not {"gate", "router", "gate_proj", "down_proj"} & set(command.words)
