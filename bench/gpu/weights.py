"""What publishing weights to a real SGLang takes, by transport and model; FP8; twenty steps of training by each.

Two checkpoints in bf16 are measured, SmolLM2 and one of Qwen3-1.7B's shape with random weights; and SmolLM2 in FP8 as
a Qwen2 whose biases are zeros, which computes the same numbers: SGLang 0.5.23 drops the scales of a Llama's blocks::

    python bench/gpu/weights.py make --tokenizer /tmp/smollm2 --folder /tmp/qwen3-shape

Each part needs servers of its own, on the card of the trainer (for ``nccl`` on another one)::

    python bench/gpu/weights.py transports --model /tmp/smollm2 --server http://127.0.0.1:30000 --output FILE
    python bench/gpu/weights.py train --model /tmp/smollm2 --server http://127.0.0.1:30000 --output FILE
    python bench/gpu/weights.py qwen2 --model /tmp/smollm2 --folder /tmp/qwen2
    python -m rollfeed.weights.quantise_checkpoint --block 64 /tmp/qwen2 /tmp/qwen2-fp8
    python bench/gpu/weights.py fp8 --model /tmp/qwen2 --server http://127.0.0.1:30000 --fp8-model /tmp/qwen2-fp8 \\
        --fp8-server http://127.0.0.1:30001 --output FILE

``--cpu`` is for a try without a GPU: fewer requests, publishes and steps. Results of several parts stand in one file.

Axes: N tokens of all texts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from sglang import machine

import rollfeed
from rollfeed.app.model import Model, build_engine
from rollfeed.config import EngineSettings
from rollfeed.engine.client import ServerEngine
from rollfeed.model_files import weight_files
from rollfeed.types import FolderUpdate, SamplingParams, TensorUpdate

TRANSPORTS = ("disk", "shm", "tensors", "delta")
"""``shm`` is ``disk`` in memory; ``nccl`` is measured where it is asked for."""
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40_960,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TRAIN = """seed = 0
[model]
checkpoint = "{served}"
[[prompts.environments]]
id = "core/compare_max"
level = 1
[rollout]
num_rollout = {steps}
rollout_batch_size = {groups}
n_samples_per_prompt = 8
[sampling]
rollout_max_response_len = 32
[engine]
context_length = 2048
[engine.sglang]
{servers}
[train]
checkpoint = "{trained}"
checkpoint_interval = 1000
[train.optimizer]
learning_rate = 1e-5
"""


class Text(NamedTuple):
    """A prompt and what was sampled behind it."""

    token_ids: NDArray[np.int32]
    prompt_length: int


class WeightsBench:
    """Measures at one server or two, and keeps the result file."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.is_small = arguments.cpu
        self.num_requests, self.num_tokens = (2, 24) if arguments.cpu else (64, 200)
        self.num_publishes = 2 if arguments.cpu else arguments.publishes
        self.device = "cpu" if arguments.cpu else "cuda:0"

    def write(self, part: str, result: Any) -> None:
        """Add what a part found to the file."""
        output = self.arguments.output
        kept = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {"parts": []}
        told = {"part": part, "command": " ".join(["python", *sys.argv]), "machine": machine(), "found": result}
        kept["parts"].append(told)
        output.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        print(f"{part}: {json.dumps(result)[:3000]}", flush=True)

    async def transports(self) -> None:
        """Publish by each transport while requests run, and say what each publish took."""
        model = rollfeed.load_model(str(self.arguments.model))
        tensors = trained_tensors(model.checkpoint, self.device)
        found: dict[str, Any] = {"tensors_bytes_in_bf16": 2 * sum(tensor.numel() for tensor in tensors.values())}
        for transport in self.arguments.transports:
            with self.servers_table(transport, self.arguments.server) as table:
                found[transport] = await told_of_failure(lambda table=table: self._publishes(model, table, tensors))
            print(transport, json.dumps(found[transport])[:1500], flush=True)
        self.write("transports", {"model": model.checkpoint.name, **found})

    async def _publishes(
        self, model: Model, table: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, Any]:
        settings = EngineSettings.model_validate({"context_length": 2048, "sglang": table})
        engine = build_engine(model, settings)
        assert isinstance(engine, ServerEngine)
        publishes = []
        async with engine:
            first = engine.policy_version
            checksum = await self._checksum(self.arguments.server)
            async with requests_running(engine, self.num_requests, num_tokens=self.num_tokens) as spans:
                for number in range(1, self.num_publishes + 1):
                    change(tensors)
                    synchronise(self.device)
                    began = time.perf_counter()
                    await engine.apply(TensorUpdate(tensors, policy_version=first + number))
                    seconds = time.perf_counter() - began
                    told = engine.metrics()
                    parts = {key: told[f"weights_{key}"] for key in ("prepare_seconds", "pause_seconds", "bytes")}
                    publishes.append({"seconds": seconds, **parts})
                    await asyncio.sleep(1.0)
            changed = await self._checksum(self.arguments.server)
        return {
            "publishes": [{key: round(value, 4) for key, value in each.items()} for each in publishes],
            # The first one makes what later ones use: a folder, a group, the base of deltas.
            "median": {key: round(statistics.median(each[key] for each in publishes[1:]), 4) for key in publishes[0]},
            "versions_in_replies": sorted(version - first for version in spans),
            "changed_the_server": changed != checksum,
        }

    async def _checksum(self, server: str) -> str:
        reply = await asked(server, "/weights_checker", {"action": "checksum"})
        return str(reply.get("per_engine_checksum", reply))

    @contextlib.contextmanager
    def servers_table(self, transport: str, server: str) -> Iterator[dict[str, Any]]:
        """Yield the table ``[engine.sglang]`` of a transport, and run the receiver that it needs."""
        table: dict[str, Any] = {"workers": [server], "weights_transport": transport}
        table["weight_update"] = self.arguments.update
        with contextlib.ExitStack() as stack:
            if transport in ("disk", "shm"):
                where = "/dev/shm" if transport == "shm" else None
                folder = stack.enter_context(tempfile.TemporaryDirectory(dir=where))
                table |= {"weights_transport": "disk", "weights_folder": folder}
            if transport == "delta":
                folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
                port = self.arguments.receiver_port
                command = [
                    sys.executable,
                    "-m",
                    "rollfeed",
                    "serve",
                    "weights",
                    "--folder",
                    folder,
                    "--port",
                    str(port),
                ]
                receiver = subprocess.Popen(command)
                stack.callback(receiver.wait)
                stack.callback(receiver.terminate)
                wait_for_port(port)
                table |= {"weights_receivers": [f"http://127.0.0.1:{port}"], "weights_folder": folder + "-sent"}
                stack.callback(shutil.rmtree, folder + "-sent", ignore_errors=True)
            yield table

    async def train(self) -> None:
        """Train by the command line with each transport; what the server answers afterwards says whether it lives."""
        found = {}
        for transport in self.arguments.transports:
            with self.servers_table(transport, self.arguments.server) as table:
                found[transport] = await told_of_failure(lambda table=table: self._trained(table))
            print(transport, json.dumps(found[transport])[:1500], flush=True)
        self.write("train", {"model": self.arguments.model.name, **found})

    async def _trained(self, table: Mapping[str, Any]) -> dict[str, Any]:
        import pyarrow.parquet as pq

        text = TRAIN.format(
            served=self.arguments.served or self.arguments.model,
            trained=self.arguments.model,
            steps=2 if self.is_small else 20,
            groups=2 if self.is_small else 32,
            servers="\n".join(f"{key} = {json.dumps(value)}" for key, value in table.items()),
        )
        with tempfile.TemporaryDirectory() as folder:
            file, out = Path(folder, "train.toml"), Path(folder, "run")
            await asyncio.to_thread(file.write_text, text, encoding="utf-8")
            began = time.perf_counter()
            command = [sys.executable, "-m", "rollfeed", "train", str(file), "--out", str(out)]
            process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
            code, seconds = await process.wait(), time.perf_counter() - began
            steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
            rows = [
                row for file in sorted((out / "batches").glob("*.parquet")) for row in pq.read_table(file).to_pylist()
            ]
        names = sorted({name for step in steps for name in step if "weights" in name or "proof" in name})
        return {
            "exit_code": code,
            "seconds": round(seconds, 1),
            "steps": len(steps),
            "versions_in_samples": sorted({span["policy_version"] for row in rows for span in row["spans"]}),
            "server_lives": "weight_version" in await asked(self.arguments.server, "/model_info"),
            "by_step": {name: [step.get(name) for step in steps] for name in names},
        }

    async def fp8(self) -> None:
        """Publish a model in bf16 to a server of it in FP8, and compare bytes and log-probabilities."""
        arguments = self.arguments
        model, served = rollfeed.load_model(str(arguments.model)), rollfeed.load_model(str(arguments.fp8_model))
        tensors = trained_tensors(model.checkpoint, self.device)
        settings = {"context_length": 2048}
        engine = build_engine(
            model, EngineSettings.model_validate({**settings, "sglang": {"workers": [arguments.server]}})
        )
        async with engine:
            texts = await sampled_texts(engine, model, num_tokens=16 if self.is_small else 128)
            bf16_N = await scores(engine, texts)
        found: dict[str, Any] = {"tokens": len(bf16_N)}
        for transport in arguments.transports:
            with self.servers_table(transport, arguments.fp8_server) as table:
                found[transport] = await told_of_failure(
                    lambda table=table: self._fp8_publish(served, table, tensors, texts, bf16_N)
                )
            print(transport, json.dumps(found[transport])[:1500], flush=True)
        self.write("fp8", {"model": served.checkpoint.name, **found})

    async def _fp8_publish(
        self,
        served: Model,
        table: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        texts: Sequence[Text],
        bf16_N: NDArray[np.float64],
    ) -> dict[str, Any]:
        """Have the server load its folder, publish other weights, and then those of the folder in bf16."""
        server = self.arguments.fp8_server
        settings = EngineSettings.model_validate({"context_length": 2048, "sglang": table})
        async with build_engine(served, settings) as engine:
            await engine.apply(FolderUpdate(served.checkpoint, policy_version=engine.policy_version + 1))
            before, started_N = await self._checksum(server), await scores(engine, texts)
            other = {name: tensor * 1.05 for name, tensor in tensors.items()}
            await engine.apply(TensorUpdate(other, policy_version=engine.policy_version + 1))
            between = await self._checksum(server)
            began = time.perf_counter()
            await engine.apply(TensorUpdate(tensors, policy_version=engine.policy_version + 1))
            seconds = time.perf_counter() - began
            after, published_N = await self._checksum(server), await scores(engine, texts)
        return {
            "seconds": round(seconds, 3),
            "another_publish_changed_the_bytes": between != before,
            "bytes_are_those_loaded_from_disk": after == before,
            "scores_differ_from_those_of_the_folder_by": float(np.abs(published_N - started_N).mean()),
            "mean_difference_to_bf16": float(np.abs(published_N - bf16_N).mean()),
            "p99_difference_to_bf16": float(np.quantile(np.abs(published_N - bf16_N), 0.99)),
            "signed_difference_to_bf16": float((published_N - bf16_N).mean()),
        }


def make(arguments: argparse.Namespace) -> None:
    """Write a checkpoint of Qwen3-1.7B's shape with random weights in bf16; its tokenizer is another model's."""
    shape = SHAPE | {"num_hidden_layers": arguments.layers}
    hidden, ffn, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = head * shape["num_attention_heads"], head * shape["num_key_value_heads"]
    of_layer = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes = {"model.embed_tokens.weight": (shape["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for layer in range(arguments.layers):
        shapes |= {f"model.layers.{layer}.{name}.weight": size for name, size in of_layer.items()}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: torch.ones(size, dtype=torch.bfloat16)
        if len(size) == 1
        else (torch.randn(size, generator=generator, device=device) * 0.02).bfloat16().cpu()
        for name, size in shapes.items()
    }
    save_file(tensors, arguments.folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (arguments.tokenizer / name).exists():
            shutil.copyfile(arguments.tokenizer / name, arguments.folder / name)
    (arguments.folder / "config.json").write_text(json.dumps(shape, indent=1), encoding="utf-8")


def as_qwen2(arguments: argparse.Namespace) -> None:
    """Write a Llama as a Qwen2 with biases of zero."""
    source, folder = arguments.model, arguments.folder
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        weight = tensors[name]
        tensors[name.removesuffix("weight") + "bias"] = torch.zeros(len(weight), dtype=weight.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}
    config |= {"rope_theta": config.get("rope_theta") or config["rope_parameters"]["rope_theta"]}
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def trained_tensors(checkpoint: Path, device: str) -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors as a trainer has them."""
    return {
        name: tensor.to(device, torch.float32)
        for file in weight_files(checkpoint)
        for name, tensor in load_file(file).items()
    }


def change(tensors: Mapping[str, torch.Tensor], learning_rate: float = 1e-6) -> None:
    """Move each weight by a learning rate, up or down, as a step of AdamW does."""
    for tensor in tensors.values():
        tensor += learning_rate * torch.sign(torch.randn_like(tensor))


def synchronise(device: str) -> None:
    """Wait for all that a card was told to do."""
    if device != "cpu":
        torch.cuda.synchronize()


def wait_for_port(port: int, *, seconds: float = 120.0) -> None:
    """Wait until somebody listens on a port of this host."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5.0):
            return
        time.sleep(0.5)
    raise TimeoutError(f"nobody listens on port {port}")


@contextlib.asynccontextmanager
async def requests_running(engine: ServerEngine, count: int, *, num_tokens: int) -> Any:
    """Keep as many requests in flight; yields the set of versions of the tokens that came."""
    generator, versions = np.random.default_rng(0), set()
    is_over = asyncio.Event()

    async def keep_asking(number: int) -> None:
        rounds = 0
        while not is_over.is_set():
            prompt = generator.integers(1000, 20_000, 64).astype(np.int32)
            params = SamplingParams(max_new_tokens=num_tokens, min_new_tokens=num_tokens)
            completion = await engine.generate(prompt, params, request_id=f"r{number}-{rounds}")
            versions.update(span.policy_version for span in completion.version_spans)
            rounds += 1

    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(keep_asking(number))
        await asyncio.sleep(1.0)
        try:
            yield versions
        finally:
            is_over.set()


async def sampled_texts(engine: Any, model: Model, *, num_tokens: int) -> list[Text]:
    """Return questions of an environment with what a server says to them; ends of answers are no ends here."""
    source = rollfeed.environment_source("core/compare_max", level=1, seed=0, tokenizer=model.tokenizer)
    prompts = [prompt.token_ids for prompt in await source.draw(16)]
    params = SamplingParams(max_new_tokens=num_tokens, min_new_tokens=num_tokens)
    replies = [engine.generate(prompt, params, request_id=f"t{index}") for index, prompt in enumerate(prompts)]
    completions = await asyncio.gather(*replies)
    pairs = zip(prompts, completions, strict=True)
    return [Text(np.concatenate([prompt, each.token_ids]), len(prompt)) for prompt, each in pairs]


async def scores(engine: Any, texts: Sequence[Text]) -> NDArray[np.float64]:
    """Return a server's log-probabilities of all sampled tokens, ``(N,)``."""
    (found,) = (await engine.score([text.token_ids for text in texts])).values()
    parts = np.split(found, np.cumsum([len(text.token_ids) - 1 for text in texts])[:-1])
    return np.concatenate([part[text.prompt_length - 1 :] for part, text in zip(parts, texts, strict=True)])


async def asked(server: str, path: str, body: Any = None) -> dict[str, Any]:
    """Return a server's answer: of a POST where there is a body."""
    async with aiohttp.ClientSession(trust_env=False) as session:
        method = "GET" if body is None else "POST"
        async with session.request(method, server + path, json=body) as response:
            found: dict[str, Any] = await response.json()
            return found


async def told_of_failure(run: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    """Return what a part found, or why it found nothing."""
    try:
        return await run()
    except Exception as error:
        inner = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
        return {"error": f"{type(inner).__name__}: {inner}"[:500]}


def main() -> None:
    """Read the arguments and run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["make", "qwen2", "transports", "train", "fp8"])
    parser.add_argument("--model", type=Path, help="a checkpoint in bf16, with its tokenizer")
    parser.add_argument("--server", help="address of a server of it")
    parser.add_argument(
        "--served", type=Path, help="train: the checkpoint that the server has, where it is another one"
    )
    parser.add_argument("--fp8-model", type=Path, help="fp8: the same model in FP8")
    parser.add_argument("--fp8-server", help="fp8: address of a server of that")
    parser.add_argument("--transports", nargs="+", default=TRANSPORTS, choices=[*TRANSPORTS, "nccl"])
    parser.add_argument("--receiver-port", type=int, default=30200, help="of the receiver of deltas, which is started")
    parser.add_argument("--publishes", type=int, default=6, help="transports: how many by each")
    parser.add_argument("--update", choices=["retract", "abort", "in_place"], default="retract", help="what runs then")
    parser.add_argument("--tokenizer", type=Path, help="make: a folder to take the tokenizer from")
    parser.add_argument("--folder", type=Path, help="make, qwen2: what is written")
    parser.add_argument("--layers", type=int, default=28, help="make: fewer make a smaller model")
    parser.add_argument("--cpu", action="store_true", help="a try on a CPU: few requests, publishes and steps")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.part in ("make", "qwen2"):
        {"make": make, "qwen2": as_qwen2}[arguments.part](arguments)
    else:
        asyncio.run(getattr(WeightsBench(arguments), arguments.part)())


if __name__ == "__main__":
    main()
