from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import ForkedCommand

import rollfeed
from rollfeed.cli.main import main

Start = Callable[..., ForkedCommand]


def post(url: str, body: Any, *, key: str = "") -> Any:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def address_of(command: ForkedCommand) -> str:
    for line in command.stdout:
        if "to agents at" in line:
            return line.rpartition(" ")[2].strip()
    raise AssertionError("it ended before it served")


def test_a_gateway_over_the_embedded_engine_knows_its_sessions_after_a_kill(
    start_rollfeed: Start, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    arguments = ("serve", "gateway", "--model", str(tiny_checkpoint), "--port", "0", "--context-length", "128")
    folder = ("--folder", str(tmp_path / "sessions"), "--served-name", "policy")
    first = start_rollfeed(*arguments, *folder)
    address = address_of(first)
    opened = post(f"{address}/sessions", {"label": "x"})
    question = {"role": "user", "content": "a"}
    body = {"model": "policy", "messages": [question], "max_tokens": 8}
    told = post(f"{opened['openai_base_url']}/chat/completions", body)["choices"][0]["message"]
    first.kill()
    first.wait()
    second = start_rollfeed(*arguments, *folder)
    address = address_of(second)
    body["messages"] = [question, told, question]
    post(f"{address}/v1/chat/completions", body, key=opened["key"])
    samples = post(f"{address}/sessions/{opened['id']}/finish", {"reward": 1.0})["samples"]
    assert samples[-1]["reward"] == 1.0
    assert samples[-1]["metadata"]["num_turns"] == 2
    second.send_signal(signal.SIGTERM)
    assert second.wait(timeout=60) == 0
    assert len((tmp_path / "sessions" / "samples.jsonl").read_text().splitlines()) == len(samples)


BROKEN_DEVICE = """
import sys
from rollfeed.cli.main import main
from rollfeed.engine.backends.batching import ContinuousBatcher
def step(self, between_tokens): raise RuntimeError("the device is broken")
ContinuousBatcher.step = step
sys.exit(main(sys.argv[1:]))
"""


def test_x01_a_gateway_whose_engines_thread_is_dead_ends_with_the_reason(tiny_checkpoint: Path) -> None:
    arguments = ("serve", "gateway", "--model", str(tiny_checkpoint), "--port", "0", "--context-length", "128")
    source = {**os.environ, "PYTHONPATH": str(Path(rollfeed.__file__).parents[1])}
    command = [sys.executable, "-c", BROKEN_DEVICE, *arguments]
    with subprocess.Popen(command, env=source, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = ""
        while "to agents at" not in line:
            line = process.stderr.readline()
            assert line, "it ended before it served"
        opened = post(f"{line.rpartition(' ')[2].strip()}/sessions", {})
        with pytest.raises(urllib.error.HTTPError):
            post(f"{opened['openai_base_url']}/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
        assert process.wait(timeout=60) == 1
        *_, last = process.stderr.read().splitlines()
        assert last == "rollfeed: the engine's thread failed: RuntimeError: the device is broken"


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (("--port", "70000"), "--port 70000"),
        (("--max-turns", "0"), "--max-turns 0"),
        (("--host", "0.0.0.0"), "--operator-key-env"),
        (("--operator-key-env", "NO_SUCH_VARIABLE"), "NO_SUCH_VARIABLE"),
        (("--model", "/nowhere/model"), "/nowhere/model"),
    ],
)
def test_wrong_option_is_refused_in_one_line(
    capfd: pytest.CaptureFixture[str], options: tuple[str, str], cause: str
) -> None:
    assert main(["serve", "gateway", *options]) == 2
    err = capfd.readouterr().err
    assert cause in err
    assert len(err.splitlines()) == 1
