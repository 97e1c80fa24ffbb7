"""``rollfeed serve fake-sglang`` as a process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rollfeed
from rollfeed.cli.main import main


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    source = str(Path(rollfeed.__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, "-m", "rollfeed", "serve", "fake-sglang", "--port", "0", *arguments],
        env={**os.environ, "PYTHONPATH": source},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def next_address(process: subprocess.Popen[str], kind: str) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    start = f"fake {kind} at "
    assert line.startswith(start), (line, process.stderr and process.stderr.read())
    return line.removeprefix(start).strip()


def ask(address: str, body: Any = None) -> Any:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    data = None if body is None else json.dumps(body).encode()
    with opener.open(urllib.request.Request(address, data), timeout=60) as response:
        return json.loads(response.read() or b"null")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_it_serves_until_it_is_told_to_end(number: int, code: int) -> None:
    with serving("--workers", "2", "--router", "old", "--mode", "time-model", "--num-slots", "7") as process:
        addresses = [next_address(process, "SGLang") for _ in range(2)]
        router = next_address(process, "router")
        assert ask(router + "/list_workers") == {"urls": addresses}
        assert ask(addresses[0] + "/server_info")["fake"]["time_model"]["num_slots"] == 7
        process.send_signal(number)
        assert process.wait(timeout=120) == code
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_scripts_and_faults_are_options(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps([{"output_ids": [5, 2], "text": "hi"}]))
    fault = json.dumps({"kind": "die", "path": "/health"})
    with serving("--mode", "scripted", "--script", str(script), "--fault", fault) as process:
        address = next_address(process, "SGLang")
        assert ask(address + "/generate", {"input_ids": [1]})["text"] == "hi"
        with pytest.raises(ConnectionError):
            ask(address + "/health")
        assert process.wait(timeout=120) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--fault", "{"], "--fault: not JSON"),
        (["--fault", '{"kind": "hagn"}'], "hagn"),
        (["--script", "nowhere.json"], "--script nowhere.json: No such file"),
        (["--workers", "0"], "num_workers = 0"),
        (["--speed", "0"], "`float` > 0.0 - at `$.speed`"),
        (["--policy", "random"], "policy = 'random'"),
        (["--mode", "time-model", "--vocab-size", "40"], "vocab_size = 40: the time model needs ids of its own"),
    ],
)
def test_wrong_usage_is_code_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "fake-sglang", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["serve", "fake-sglang", "--help"])
    assert "example: rollfeed serve fake-sglang" in capsys.readouterr().out
