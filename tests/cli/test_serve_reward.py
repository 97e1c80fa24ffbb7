from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request

import pytest

from rollfeed.cli.main import main


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_server_answers_until_it_is_told_to_end(leaves_no_process: None, number: signal.Signals, code: int) -> None:
    command = [sys.executable, "-m", "rollfeed", "serve", "reward", "--port", "0", "--rm-type", "math"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    with process, process.stderr:
        address = process.stderr.readline().rpartition(" ")[2].strip()
        body = {"response": r"\boxed{\sqrt{5+2\sqrt{6}}}", "label": r"\sqrt2+\sqrt3"}
        request = urllib.request.Request(
            f"{address}/get_reward", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert json.load(reply)["reward"] == 1.0
        process.send_signal(number)
        assert process.wait(timeout=60) == code
        assert process.stderr.read() == ""


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (("--port", "70000"), "--port 70000"),
        (("--max-in-progress", "0"), "--max-in-progress 0"),
        (("--rm-type", "maths"), "did you mean math?"),
        (("--allow", "maths"), "did you mean math?"),
        ((), "--rm-type: name the grader"),
    ],
)
def test_wrong_option_is_refused_in_one_line(
    capfd: pytest.CaptureFixture[str], options: tuple[str, str], cause: str
) -> None:
    assert main(["serve", "reward", *options]) == 2
    err = capfd.readouterr().err
    assert cause in err
    assert len(err.splitlines()) == 1
