"""A coding agent written for slime, in whole runs: what is trained was sampled, and nothing else is left of it."""

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from tests.integration.linting import findings_in

from rollfeed.benchmarks.machine import command_environment
from rollfeed.store import RunReader

CODING = Path(__file__).parents[2] / "examples" / "slime" / "slime_coding.py"
BACKEND = "SLIME_AGENT_SANDBOX_BACKEND"


def plugins(api: str) -> str:
    return f'[plugins]\ngenerate = "slime:{CODING}:generate"\nslime_args = {{agent_api = "{api}"}}\n'


@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_a_coding_agent_s_calls_are_trained_on(rollfeed, settings_file, tmp_path, monkeypatch, api: str) -> None:
    monkeypatch.setenv(BACKEND, "local")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    settings = settings_file(plugins(api), num_rollout=1)
    fewer = ("--set", "rollout.over_sampling_batch_size=3")
    ran = rollfeed("run", settings, "--out", tmp_path / "run", "--json", *fewer)
    assert ran.code == 0, ran.err
    with RunReader(tmp_path / "run") as run:
        samples = run.batch(0).samples
    assert len(samples) == 6
    assert {sample.metadata["agent_exit_code"] for sample in samples} == {0}
    assert {sample.reward for sample in samples} <= {0.0, 1.0}
    assert {sample.metadata["num_turns"] for sample in samples} <= {1, 2}
    assert max(sample.metadata["num_turns"] for sample in samples) == 2
    assert findings_in(tmp_path / "run") == []
    assert not list(tmp_path.glob("rollfeed-sandbox-*"))


def test_a_killed_run_takes_its_agents_with_it(settings_file, tmp_path: Path) -> None:
    settings = settings_file(plugins("openai"), num_rollout=1000)
    command = [sys.executable, "-m", "rollfeed", "run", str(settings), "--out", str(tmp_path / "run")]
    environment = {**command_environment(), BACKEND: "local", "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: bool(agents_in(tmp_path)))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    until(lambda: not agents_in(tmp_path))


def until(holds) -> None:
    end = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def agents_in(folder: Path) -> list[str]:
    """Return the processes of sandboxes below a folder: their mounts are there."""
    found = subprocess.run(["ps", "-wweo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in found if f"{folder}/rollfeed-sandbox-" in line]
