"""Trainer and servers that share GPUs, and a run whose servers do not start."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.engine.launch.conftest import ROOT, STAND_IN

from rollfeed.cli.main import main
from rollfeed.config import validate_settings
from rollfeed.errors import ConfigError

SETTINGS = """
[model]
checkpoint = "{checkpoint}"

[[prompts.environments]]
id = "core/copy_text"

[rollout]
num_rollout = 2
rollout_batch_size = 2
n_samples_per_prompt = 2

[sampling]
rollout_max_response_len = 8

[engine]
context_length = 384

[engine.sglang]

[engine.launch]
command = {command}
colocate = true
flags = {{ calls = "{calls}" }}
env = {{ PYTHONPATH = "{path}", STAND_IN_OF = "{value}" }}

[weights.proof]
num_texts = 0

[train]
"""


@pytest.fixture
def settings(tmp_path: Path, tiny_checkpoint: Path, mark: str) -> Path:
    file = tmp_path / "run.toml"
    text = SETTINGS.format(
        checkpoint=tiny_checkpoint,
        command=json.dumps(STAND_IN),
        calls=tmp_path / "calls",
        path=os.pathsep.join([str(ROOT), str(ROOT / "src")]),
        value=mark.partition("=")[2],
    )
    file.write_text(text)
    return file


def letters(calls: Path) -> str:
    """The calls that count, in order: generate, sleep, wake, update."""
    wanted = {"/generate": "g", "/release_memory_occupation": "s", "/resume_memory_occupation": "w"}
    wanted["/update_weights_from_disk"] = "u"
    return "".join(wanted.get(call, "") for call in calls.read_text().split())


def test_servers_sleep_through_each_update_and_are_given_its_weights_awake(settings: Path, tmp_path: Path) -> None:
    out, calls = tmp_path / "run", tmp_path / "calls"
    train = ["train", str(settings), "--out", str(out), "--quiet"]
    assert main(train) == 0
    assert letters(calls) == "ggggswuggggswu"
    assert (out / "servers" / "0.log").exists()
    calls.unlink()
    assert main([*train, "--set", "rollout.num_rollout=3"]) == 0
    assert letters(calls) == "uggggswu"  # a server that has just been started has the first weights
    assert (out / "servers" / "0.log").read_text().count("rollfeed starts: ") == 2


def test_a_run_whose_server_does_not_start_ends_with_its_line(
    settings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--set", "engine.launch.flags.no-such-flag=true", "--quiet"]
    assert main(["run", str(settings), "--out", str(tmp_path / "run"), *options]) == 1
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert "engine.launch: server 0 (SGLang, http://127.0.0.1:" in told
    assert "unrecognized arguments: --no-such-flag; correct engine.launch.flags" in told
    assert str(tmp_path / "run" / "servers" / "0.log") in told


@pytest.mark.parametrize(
    ("engine", "rollout", "message"),
    [
        ({"launch": {}}, {}, "engine: launch starts servers of [engine.sglang], or of [engine.openai] (vLLM): add"),
        ({"launch": {}, "openai": {"base_url": "http://a:1"}}, {}, "engine: openai.base_url and launch are both given"),
        ({"launch": {}, "sglang": {"router": "http://a:1"}}, {}, "engine: sglang.router and launch are both given"),
        ({"launch": {}, "sglang": {"api_key_env": "K"}}, {}, "sglang.api_key_env: servers of launch are open to this"),
        (
            {"launch": {"colocate": True}, "sglang": {}},
            {"mode": "async"},
            "engine.launch.colocate: servers have no time to give up their memory with rollout.mode = 'async'",
        ),
        ({"launch": {"gpus": [[0], [0]]}, "sglang": {}}, {}, "none may have that of another: [[0], [1]]"),
        ({"launch": {"gpus": [[0]], "num_servers": 2}, "sglang": {}}, {}, "gpus says how many servers there are"),
        ({"launch": {"port": 65535, "num_servers": 2}, "sglang": {}}, {}, "2 servers need as many ports from there"),
        ({"launch": {"flags": {"x": [[1]]}}, "sglang": {}}, {}, "flags.x = [[1]]: give text, a number"),
    ],
)
def test_settings_that_contradict_are_refused_in_one_line(engine: dict, rollout: dict, message: str) -> None:
    tree = {"prompts": {"environments": [{"id": "core/copy_text"}]}, "engine": engine, "rollout": rollout}
    with pytest.raises(ConfigError) as caught:
        validate_settings(tree, where="x.toml")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
