"""Real servers that the run starts: a training through a death of its server, and nothing left after a kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.engines.servers import OFFLINE, STAND_INS, python_of

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

VLLM = {
    "command": "vllm serve",
    # There is no GPU whose memory it could give up; the routes are there all the same.
    "flags": {"dtype": "float32", "enforce-eager": True, "max-num-seqs": 16, "enable-sleep-mode": False},
    "env": {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "2"},
}
SGLANG = {
    "command": "python -W ignore -m sglang.launch_server",
    "flags": {
        "device": "cpu",
        "attention-backend": "torch_native",
        "sampling-backend": "pytorch",
        "grammar-backend": "none",
        "cuda-graph-backend-decode": "disabled",
        "cuda-graph-backend-prefill": "disabled",
        "mem-fraction-static": 0.1,
        "max-total-tokens": 20000,
        "disable-overlap-schedule": True,
        "enable-memory-saver": False,
        "enable-weights-cpu-backup": False,
    },
    "env": {
        "PYTHONPATH": str(STAND_INS),
        "OMP_NUM_THREADS": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
    },
}
KINDS = {"openai": ("vllm", VLLM), "sglang": ("sglang", SGLANG)}


def marked(mark: str) -> dict[int, str]:
    """Commands of the processes whose environment has a word."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found[int(path.parent.name)] = path.with_name("cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


def wait_until(condition: Callable[[], Any], seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.1)
    return found


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def launched(kind: str, command: Any, tmp_path: Path) -> tuple[Any, str]:
    """A command whose servers are launched, and the word by which they are found."""
    server, given = KINDS[kind]
    program, *words = given["command"].split()
    mark = f"LAUNCHED_FOR={tmp_path}"
    env = {**OFFLINE, "PYTHONPATH": "", **given["env"], "LAUNCHED_FOR": str(tmp_path)}
    launch = {"command": [str(python_of(server).parent / program), *words], "flags": given["flags"], "env": env}
    options = {f"engine.launch.{key}": value for key, value in launch.items() if key == "command"}
    options |= {f"engine.launch.{key}.{name}": each for key in ("flags", "env") for name, each in launch[key].items()}
    return command(**{f"engine.{kind}.request_timeout_seconds": 1200.0, **options}), mark


def test_a_training_survives_the_death_of_its_server(launched: Any) -> None:
    run, mark = launched
    # Long enough that it dies under requests.
    long = "sampling.rollout_max_response_len=200"
    training = run.start("train", "--set", long, "--set", "engine.launch.colocate=true", num_rollout=4)
    wait_until(lambda: training.poll() is not None or len(run.lines("train.jsonl")) >= 2, 900)
    assert training.poll() is None, training.stdout.read()
    before = marked(mark)
    time.sleep(0.3)
    (server,) = [pid for pid, words in before.items() if _is_server(pid, words, before)]
    os.kill(server, signal.SIGKILL)
    output, _ = training.communicate(timeout=900)
    assert training.returncode == 0, output
    assert "by signal SIGKILL" in output
    assert "it is given them again" in output
    steps = run.lines("train.jsonl")
    assert len(steps) == 4
    assert run.lines("metrics.jsonl")[-1]["engine/readmitted_workers"] == 1
    assert marked(mark) == {}
    assert (run.out / "servers" / "0.log").stat().st_size > 1000


def test_a_training_of_an_adapter_gives_servers_the_adapter_alone(launched: Any, kind: str) -> None:
    run, mark = launched
    options = ["train.lora.rank=8", f"engine.{kind}.weights_transport=adapter"]
    if kind == "sglang":
        options.append("engine.launch.flags.lora-backend=torch_native")
    for num_rollout in (2, 3):  # the servers that it goes on with have no adapter yet
        code, output = run.run(
            "train", *(word for each in options for word in ("--set", each)), num_rollout=num_rollout
        )
        assert code == 0, output
    steps, rollouts = run.lines("train.jsonl"), run.lines("metrics.jsonl")
    assert len(steps) == 3
    assert 0 < rollouts[-1]["engine/weights_bytes"] < 400_000  # the weights are 1.6 million
    assert [step["train/mismatch_kl"] < 1e-3 for step in steps] == [True] * 3
    assert (run.out / "model" / "adapter" / "adapter_model.safetensors").exists()
    assert marked(mark) == {}


def test_nothing_is_left_after_a_kill(launched: Any) -> None:
    run, mark = launched
    training: subprocess.Popen[str] = run.start("run", num_rollout=1000)
    wait_until(lambda: training.poll() is not None or run.lines("metrics.jsonl"), 900)
    assert training.poll() is None, training.communicate()[0]
    assert len(marked(mark)) >= 3
    training.kill()
    training.communicate()
    wait_until(lambda: not marked(mark), 30)


def _is_server(pid: int, words: str, found: dict[int, str]) -> bool:
    """Whether a process is the child of a keeper."""
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return "keeper.py" in found.get(parent, "") and "keeper.py" not in words
