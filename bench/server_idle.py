"""How soon ``rollfeed serve engine`` gives its first token, and what it uses while nobody asks.

Each time a new process serves the default model, of which the weights are in the page cache. The clock runs
from the start of the process to the reply with the first token; then the server is left alone, and the time
that its threads have computed is read before and after.

    python bench/server_idle.py --output bench/server_idle.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rollfeed.engine import DEFAULT_MODEL, resolve_checkpoint

FIRST_TOKEN_GOAL_SECONDS = 10.0
IDLE_GOAL_CORES = 0.01
PROMPT = "The capital of France is"
DEADLINE_SECONDS = 300.0


def ask_for_a_token(address: str) -> None:
    body = json.dumps({"text": PROMPT, "sampling_params": {"max_new_tokens": 1, "ignore_eos": True}}).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(f"{address}/generate", body, {"Content-Type": "application/json"})
    with opener.open(request, timeout=DEADLINE_SECONDS) as response:
        assert len(json.load(response)["output_ids"]) == 1


def cpu_seconds(process_id: int) -> float:
    """Return what all threads of a process have computed so far, in Linux' ticks."""
    fields = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(*, model: str, idle_seconds: float) -> dict[str, float]:
    load_before = round(os.getloadavg()[0], 2)
    command = [sys.executable, "-m", "rollfeed", "serve", "engine", "--model", model, "--port", "0"]
    started = time.perf_counter()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            line = ""
            while not line.startswith("serving "):
                line = server.stderr.readline()
                assert line, "the server has ended before it listened"
            serving_seconds = time.perf_counter() - started
            ask_for_a_token(line.split()[-1])
            first_token_seconds = time.perf_counter() - started
            busy_seconds = cpu_seconds(server.pid)
            idle_from = time.perf_counter()
            time.sleep(idle_seconds)
            used_seconds = cpu_seconds(server.pid) - busy_seconds
            idle_for = time.perf_counter() - idle_from
        finally:
            server.terminate()
    return {
        "load_before": load_before,
        "serving_seconds": round(serving_seconds, 2),
        "first_token_seconds": round(first_token_seconds, 2),
        "start_cpu_seconds": round(busy_seconds, 2),
        "idle_seconds": round(idle_for, 2),
        "idle_cpu_seconds": round(used_seconds, 2),
        "idle_cores": round(used_seconds / idle_for, 5),
    }


def cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--idle-seconds", type=float, default=20.0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    for file in Path(resolve_checkpoint(arguments.model)).glob("*.safetensors"):
        file.read_bytes()  # into the page cache
    runs = [measure(model=arguments.model, idle_seconds=arguments.idle_seconds) for _ in range(arguments.repetitions)]
    first_token_seconds = statistics.median(run["first_token_seconds"] for run in runs)
    idle_cores = max(run["idle_cores"] for run in runs)
    result: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "workload": f"rollfeed serve engine --model {arguments.model}, one /generate of one token, then nothing",
        "median_first_token_seconds": first_token_seconds,
        "most_idle_cores": idle_cores,
        "goals": {
            "first_token_seconds": FIRST_TOKEN_GOAL_SECONDS,
            "idle_cores": IDLE_GOAL_CORES,
            "met": first_token_seconds < FIRST_TOKEN_GOAL_SECONDS and idle_cores < IDLE_GOAL_CORES,
        },
        "runs": runs,
        "machine": {
            "cores": os.cpu_count(),
            "cpu": cpu_name(),
            "python": platform.python_version(),
            "torch": version("torch"),
        },
    }
    text = json.dumps(result, indent=2) + "\n"
    sys.stdout.write(text)
    if arguments.output is not None:
        arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
