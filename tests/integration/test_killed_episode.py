"""An episode of several turns that a kill interrupts is resumed where it was."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import rollfeed

SCRIPT = Path(__file__).with_name("killed_episode.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(rollfeed.__file__).parents[1])}


@pytest.mark.parametrize(("stop", "answers"), [("in the tool", ["lost"] * 4), ("after the tool", None)])
def test_a_killed_episode_resumes_and_calls_no_tool_twice(tmp_path: Path, stop: str, answers: list[str] | None) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path)]
    with subprocess.Popen([*command, stop], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "stopped\n"
        process.send_signal(signal.SIGKILL)
    done = subprocess.run([*command, "never"], capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr
    num_requests, *responses = done.stdout.splitlines()
    assert int(num_requests) == 4  # the second turns only
    assert sorted((tmp_path / "calls").read_text().split()) == ["0", "1", "2", "3"]
    told = [response.split("|")[1] for response in responses]
    assert told == (answers or [f"answer {number}" for number in range(4)])


def test_a_killed_agent_calls_again_only_the_tool_that_may_be_called_twice(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT.with_name("killed_agent.py")), str(tmp_path)]
    with subprocess.Popen([*command, "stop"], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "stopped\n"
        process.send_signal(signal.SIGKILL)
    done = subprocess.run([*command, "never"], capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr
    num_requests, *told = done.stdout.splitlines()
    assert int(num_requests) == 4  # the second turns only
    assert sorted((tmp_path / "calls").read_text().split()) == ["append"] * 4 + ["look"] * 8
    assert len(told) == 4
    for text in map(json.loads, told):
        unsure, answer = text.split("tool: ")[1:]
        assert "it is not known whether it was made" in unsure
        assert answer.startswith("look is done")
