"""Training by one GPU and by several: tokens a second, memory and what publishing takes, at a shape of a real model.

A checkpoint with random weights is made on the spot, so that answers mean nothing; a reward that nobody can tell from
chance keeps every group trained. The engine is a real SGLang that is started here, or the embedded one::

    python bench/gpu/train_ranks.py --processes 1 2 --sglang /venvs/sglang/bin/python --output FILE

With SGLang on a card of its own (``--server-gpu``), or on one that a process of the trainer has as well
(``--memory`` is then its share of it). ``--device cpu --shape small --engine embedded`` is for a try without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang import machine

import weights

SETTINGS = """seed = {seed}
[model]
checkpoint = "{model}"
[[prompts.environments]]
id = "core/copy_text"
apply_chat_template = false
[rollout]
num_rollout = {steps}
rollout_batch_size = {groups}
n_samples_per_prompt = 8
[sampling]
rollout_max_response_len = {length}
rollout_temperature = 1.0
[reward]
override_environments = true
functions_in_workers = false
[plugins]
reward = "{folder}/chance.py:score"
[engine]
context_length = {context}
{engine}
[train]
num_processes = {processes}
device = "{device}"
micro_batch_tokens = {tokens}
activation_checkpointing = {checkpointing}
share_prompts = false
checkpoint_interval = {steps}
[train.optimizer]
learning_rate = 1e-6
"""
REWARD = """
def score(sample, prompt):
    return float(sample.response_token_ids.sum() % 2)
"""
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}
PEAK_BF16 = 989e12
"""Operations a second of an H200's matrix units, dense."""


def main() -> None:
    """Make the model, train with each number of processes, and write what each took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="train.num_processes, one run each")
    parser.add_argument("--device", default="cuda:0", help="train.device: the first GPU of the trainer, or cpu")
    parser.add_argument("--shape", choices=["qwen3-1.7b", "small"], default="qwen3-1.7b")
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer; by default one of bytes is made")
    parser.add_argument("--engine", choices=["sglang", "embedded"], default="sglang")
    parser.add_argument("--sglang", default=sys.executable, help="Python of an environment with SGLang")
    parser.add_argument("--server-gpu", default="0", help="CUDA_VISIBLE_DEVICES of the server")
    parser.add_argument("--memory", type=float, default=0.25, help="--mem-fraction-static of the server")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--limit", type=float, default=240, help="seconds of a run, after which it is ended")
    parser.add_argument("--groups", type=int, default=32, help="of 8 answers, a batch")
    parser.add_argument("--length", type=int, default=512, help="tokens of an answer, at most")
    parser.add_argument("--tokens", type=int, default=8192, help="train.micro_batch_tokens")
    parser.add_argument("--checkpointing", action="store_true", help="train.activation_checkpointing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "chance.py").write_text(REWARD, encoding="utf-8")
        num_parameters = make_model(folder, arguments)
        result: dict[str, Any] = {
            "command": " ".join(["python", *sys.argv]),
            "machine": machine(),
            "parameters": num_parameters,
            "runs": [],
        }
        with server(folder, arguments) as address:
            for processes in arguments.processes:
                result["runs"].append(trained(folder, arguments, address, processes, num_parameters))
                arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    first = result["runs"][0]
    for run in result["runs"][1:]:
        if "tokens_per_second" in run and "tokens_per_second" in first:
            run["times_the_first"] = round(run["tokens_per_second"] / first["tokens_per_second"], 3)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1)[-6000:])


def make_model(folder: Path, arguments: argparse.Namespace) -> int:
    """Write the checkpoint, and return how many parameters it has."""
    if arguments.shape == "small":
        weights.SHAPE.update(SMALL)
    tokenizer = arguments.tokenizer or folder / "tokenizer"
    if arguments.tokenizer is None:
        make_tokenizer(tokenizer)
    weights.make(
        SimpleNamespace(layers=weights.SHAPE["num_hidden_layers"], folder=folder / "model", tokenizer=tokenizer)  # type: ignore[arg-type]
    )
    from rollfeed.model_files import read_headers

    return sum(math.prod(header.shape) for header in read_headers(folder / "model").values())


def make_tokenizer(folder: Path) -> None:
    """Write a tokenizer with a token a byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {
        token: number for number, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, eos_token=special[2], bos_token=special[1], pad_token=special[0]
    ).save_pretrained(folder)


@contextlib.contextmanager
def server(folder: Path, arguments: argparse.Namespace) -> Iterator[str | None]:
    """Run SGLang with the model, and yield its address; None for the embedded engine."""
    if arguments.engine == "embedded":
        yield None
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["--model-path", str(folder / "model"), "--host", "127.0.0.1", "--port", str(port)]
    words += ["--mem-fraction-static", str(arguments.memory), "--context-length", str(4 * arguments.length)]
    words += getattr(arguments, "flags", [])
    log = arguments.output.with_suffix(".sglang.log").open("w")
    process = subprocess.Popen(
        [arguments.sglang, "-m", "sglang.launch_server", *words],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": arguments.server_gpu},
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 300
        while True:
            try:
                with urllib.request.urlopen(f"{address}/health", timeout=5):
                    break
            except OSError:
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"SGLang has not started: see {log.name}") from None
                time.sleep(1)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.close()


def trained(
    folder: Path, arguments: argparse.Namespace, address: str | None, processes: int, num_parameters: int
) -> dict[str, Any]:
    """Train by the command line, and return figures over all steps but the first."""
    is_cpu = arguments.device == "cpu"
    engine = 'kernels = "torch"\nprecision = "fp32"' if is_cpu else 'device = "cuda:0"'
    if address is not None:
        place = "/dev/shm/rollfeed-bench-weights"
        engine = f'[engine.sglang]\nworkers = ["{address}"]\nweights_transport = "disk"\nweights_folder = "{place}"'
    text = SETTINGS.format(
        seed=arguments.seed,
        model=folder / "model",
        folder=folder,
        steps=arguments.steps,
        groups=arguments.groups,
        length=arguments.length,
        context=4 * arguments.length,
        engine=engine,
        processes=processes,
        device=arguments.device,
        tokens=max(arguments.tokens, 4 * arguments.length),
        checkpointing=str(arguments.checkpointing).lower(),
    )
    out, file = folder / f"run-{processes}", folder / f"run-{processes}.toml"
    file.write_text(text, encoding="utf-8")
    sampler = MemorySampler(is_cpu=is_cpu)
    began = time.perf_counter()
    said = folder / f"run-{processes}.stderr"
    with sampler, said.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "rollfeed", "train", str(file), "--out", str(out)],
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(arguments.limit)
        process.kill()  # what it had done by then is told
        code = process.wait()
    found: dict[str, Any] = {
        "processes": processes,
        "exit_code": code,
        "seconds": round(time.perf_counter() - began, 1),
        "settings": text,
        "peak_memory_bytes": sampler.peaks,
    }
    if code:
        found["error"] = said.read_text(encoding="utf-8")[-2000:]
    steps, updates = (
        [json.loads(line) for line in (out / name).read_text(encoding="utf-8").splitlines()][1:]
        if (out / name).exists()
        else []
        for name in ("metrics.jsonl", "train.jsonl")
    )
    if not updates:
        return found
    seconds = sum(each["seconds"] for each in updates)
    tokens = sum(each["train/computed_tokens"] for each in updates)
    rate = tokens / seconds
    # Forward and backward, without attention; once more forward where activations are computed again.
    operations = (8 if arguments.checkpointing else 6) * num_parameters * rate
    return {
        **found,
        "tokens_per_second": round(rate, 1),
        "step_seconds": [round(each["seconds"], 3) for each in updates],
        "tokens_a_step": round(tokens / max(1, len(updates))),
        "micro_batches": [each["train/micro_batches"] for each in updates],
        "padding": round(1 - tokens / sum(each["train/padded_tokens"] for each in updates), 4),
        "share_of_bf16_peak_a_gpu": None if is_cpu else round(operations / processes / PEAK_BF16, 4),
        "publish_seconds": [round(each.get("time/publish_seconds", 0.0), 3) for each in steps],
        "losses": [each.get("train/loss") for each in updates],
        "mismatch_kl": [each.get("train/mismatch_kl") for each in updates],
    }


class MemorySampler:
    """Looks at the memory in use on each GPU, twice a second; servers on them included."""

    def __init__(self, *, is_cpu: bool) -> None:
        self.peaks: dict[str, int] = {}
        self._process: subprocess.Popen[str] | None = None
        self._is_cpu = is_cpu

    def __enter__(self) -> None:
        if not self._is_cpu:
            words = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits", "-lms", "500"]
            self._process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)

    def __exit__(self, *exc_info: object) -> None:
        if self._process is None:
            return
        self._process.terminate()
        said, _ = self._process.communicate()
        for line in said.splitlines():
            index, _, used = line.partition(", ")
            if used.strip().isdigit():
                self.peaks[index] = max(self.peaks.get(index, 0), int(used) << 20)


if __name__ == "__main__":
    main()
