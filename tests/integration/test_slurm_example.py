"""The Slurm script of examples/slurm, with real servers and a real run; only Slurm's own commands are stand-ins."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rollfeed.benchmarks.machine import command_environment, free_port, is_listening
from rollfeed.config import RunSpec
from rollfeed.store import RunReader

FOLDER = Path(__file__).parents[2] / "examples" / "slurm"
NODES = ("127.0.0.1", "127.0.0.2")
LIMIT_SECONDS = 300.0
ROLLFEED = f"{sys.executable} -m rollfeed"
STAND_INS = {
    "scontrol": """
        if [ "$1 $2" = "show hostnames" ]; then printf '%s\\n' $SLURM_JOB_NODELIST
        else echo "$@" >> scontrol.log; fi""",
    "srun": """
        while [ "${1#--}" != "$1" ]; do shift; done
        trap 'kill $(jobs -p)' TERM
        for node in $SLURM_JOB_NODELIST; do LISTEN=$node "$@" & done
        wait; wait""",
}

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("bash") is None, reason="127.0.0.2 is this machine on Linux only"
)


class Job:
    """A job of the script under the stand-ins."""

    def __init__(self, folder: Path, settings: Path, server: str) -> None:
        self.folder, self.out = folder, folder / "out"
        tools = folder / "tools"
        tools.mkdir(exist_ok=True)
        for name, script in STAND_INS.items():
            (tools / name).write_text(f"#!/bin/bash\n{script}\n")
            (tools / name).chmod(0o755)
        self.port = free_port()
        environment = command_environment() | {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": " ".join(NODES),
            "ROLLFEED": ROLLFEED,
            "ROLLFEED_PORT": str(self.port),
            "ROLLFEED_SERVER": server,
        }
        command = ["bash", str(FOLDER / "servers.sbatch"), str(settings), str(self.out)]
        self.process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True)

    def wait(self) -> int:
        return self.process.wait(timeout=LIMIT_SECONDS)

    def wait_for_steps(self, num_steps: int) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while self.num_steps() < num_steps:
            assert self.process.poll() is None, "the job has ended"
            assert time.monotonic() < deadline, "no step"
            time.sleep(0.1)

    def num_steps(self) -> int:
        path = self.out / "steps.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def test_a_job_that_is_stopped_is_queued_again_and_goes_on(
    tmp_path: Path, settings_file: Callable[..., Path], tiny_checkpoint: Path
) -> None:
    endless = settings_file("[engine.sglang]\nstartup_timeout_seconds = 300\n", num_rollout=100_000)
    model = f"--model {tiny_checkpoint} --threads 1 --num-slots 8 --context-length 384"
    server = f"{ROLLFEED} serve engine --host $LISTEN --port $ROLLFEED_PORT {model}"
    first = Job(tmp_path, endless, server)
    try:
        first.wait_for_steps(1)
        first.process.send_signal(signal.SIGTERM)
        assert first.wait() == 130
    finally:
        first.kill()
    assert (tmp_path / "scontrol.log").read_text() == "requeue 7\n"
    assert not is_listening(first.port)
    num_steps = first.num_steps()
    second = Job(
        tmp_path, settings_file("[engine.sglang]\nstartup_timeout_seconds = 300\n", num_rollout=num_steps + 1), server
    )
    try:
        assert second.wait() == 0
    finally:
        second.kill()
    assert (tmp_path / "scontrol.log").read_text() == "requeue 7\n"
    with RunReader(second.out) as run:
        assert [record.step for record in run.steps()] == list(range(num_steps + 1))


def test_a_job_ends_as_its_run_does(tmp_path: Path, settings_file: Callable[..., Path]) -> None:
    job = Job(tmp_path, settings_file("[engine.sglang]\nno_such_key = 1\n"), "sleep 1000")
    try:
        assert job.wait() == 2
    finally:
        job.kill()
    assert not (tmp_path / "scontrol.log").exists()


def test_the_settings_beside_the_script_are_right() -> None:
    overrides = ['engine.sglang.workers=["http://node1:30000","http://node2:30000"]']
    assert RunSpec.load(FOLDER / "run.toml", overrides).settings.engine.sglang is not None
