"""What the head of a model takes, whole and in chunks, by the number of trained tokens: memory, time and values.

A head of 151,936 words over hidden states of 64 numbers scores random tokens and goes the way back, in fp32 on a CPU:
whole logits, in pieces of 1 << 22 elements behind one product, as it was before, and in chunks. Memory is what tensors
hold at their highest beside the hidden states, the weight and its gradient, as PyTorch's profiler tells it; each size
is measured for both in a process of its own, one after the other; whole logits are left out where the machine has not
the memory::

    python bench/head_chunks.py --output bench/head_chunks.json

``--hidden 576 --vocabulary 49152 --tokens 1300`` are the sizes of ``rollfeed bench train``.

Axes: T trained tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TOKENS = (1024, 4096, 8192, 16384)
WAYS = ("whole", "chunks")


def measure(arguments: argparse.Namespace, num_tokens: int, way: str) -> dict[str, Any]:
    """Return what one way takes in this process."""
    import resource

    import torch
    from torch.profiler import ProfilerActivity, profile

    from rollfeed.model_files.heads import Head, HeadShape
    from rollfeed.training.scoring import ChunkSizes, score_tokens

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    hidden_TD = torch.randn(num_tokens, arguments.hidden, requires_grad=True)
    weight_VD = (torch.randn(arguments.vocabulary, arguments.hidden) * arguments.hidden**-0.5).requires_grad_()
    target_T = torch.randint(arguments.vocabulary, (num_tokens,))
    entropy_weight_T = torch.linspace(0, 1e-3, num_tokens)

    def score() -> torch.Tensor:
        if way == "whole":
            sizes = ChunkSizes(1 << 22, 1 << 22, 0)
            logprobs_T, entropy_T = score_tokens(
                hidden_TD @ weight_VD.t(), target_T=target_T, temperature=1.0, sizes=sizes
            )
        else:
            head = Head(weight_VD, None, HeadShape())
            logprobs_T, entropy_T = score_tokens(hidden_TD, target_T=target_T, temperature=1.0, head=head)
        ((logprobs_T + entropy_T * entropy_weight_T).sum() / num_tokens).backward()
        return logprobs_T.detach()

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    seconds, cpu_seconds = [], []
    for _ in range(arguments.repeats):
        hidden_TD.grad = weight_VD.grad = None
        began, computed_before = time.perf_counter(), time.process_time()
        logprobs_T = score()
        seconds.append(time.perf_counter() - began)
        cpu_seconds.append(time.process_time() - computed_before)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    hidden_TD.grad = weight_VD.grad = None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        score()
    held = highest = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            highest = max(highest, held)
    own = sum(each.nbytes for each in (hidden_TD, weight_VD))  # their gradients
    torch.save([logprobs_T, hidden_TD.grad, weight_VD.grad], f"{arguments.output}.{way}")
    return {
        "peak_gib": round((highest - own) / 2**30, 3),
        "resident_gib_beside_start": round(resident - before, 3),
        "seconds": statistics.median(seconds),
        "cpu_seconds": statistics.median(cpu_seconds),
        "all_cpu_seconds": cpu_seconds,
    }


def differences(output: Path) -> dict[str, float]:
    """Return the largest differences of both ways: of log-probabilities, and of gradients for the largest of them."""
    import torch

    files = [Path(f"{output}.{way}") for way in WAYS]
    whole, chunks = (torch.load(file) for file in files)
    names = ("logprobs", "gradient_of_hidden_states", "gradient_of_weight")
    scales = (1.0, *(float(each.abs().max()) for each in whole[1:]))
    rows = zip(names, whole, chunks, scales, strict=True)
    return {name: float((first - second).abs().max()) / scale for name, first, second, scale in rows}


def available_bytes() -> int:
    """Return the memory that is free, or would be freed."""
    rows = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return next(int(row.split()[1]) * 1024 for row in rows if row.startswith("MemAvailable"))


def main() -> None:
    """Read the arguments and measure each size both ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only is not None:
        print(json.dumps(measure(arguments, int(arguments.only[0]), arguments.only[1])))
        return
    rows = []
    for num_tokens in arguments.tokens:
        row: dict[str, Any] = {"tokens": num_tokens}
        for way in WAYS:
            logits_bytes = 4 * num_tokens * arguments.vocabulary
            if way == "whole" and 2 * logits_bytes > 0.6 * available_bytes():
                row[way] = {"not_measured": f"{2 * logits_bytes / 2**30:.1f} GiB for logits and their gradient"}
                continue
            command = [sys.executable, *sys.argv, "--only", str(num_tokens), way]
            finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            failed = {"error": f"ended with {finished.returncode}"}
            row[way] = failed if finished.returncode else json.loads(finished.stdout.splitlines()[-1])
        if all("seconds" in row[way] for way in WAYS):
            for name in ("seconds", "cpu_seconds"):
                row[f"{name}_of_whole"] = round(row["chunks"][name] / row["whole"][name], 3)
            row["largest_difference"] = differences(arguments.output)
        for way in WAYS:
            Path(f"{arguments.output}.{way}").unlink(missing_ok=True)
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
        result = {
            "command": " ".join(["python", *sys.argv]),
            "machine": {"platform": platform.platform(), "cores": os.cpu_count(), "load": os.getloadavg()[0]},
            "hidden": arguments.hidden,
            "vocabulary": arguments.vocabulary,
            "seed": arguments.seed,
            "rows": rows,
        }
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
