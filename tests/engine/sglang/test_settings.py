"""Mistakes in ``[engine.sglang]`` are one line each; what is right makes an SGLang engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollfeed import app
from rollfeed.cli.main import main
from rollfeed.config import EngineSettings, validate_settings
from rollfeed.engine.client import ServerEngine
from rollfeed.errors import ConfigError, PluginError
from rollfeed.types import TensorUpdate

BASE: dict[str, Any] = {"prompts": {"environments": [{"id": "core/copy_text"}]}}


def settings_with(**sglang: Any) -> Any:
    return validate_settings({**BASE, "engine": {"sglang": sglang}}, where="x.toml")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "x.toml: engine: sglang names no server: give workers"),
        ({"workers": ["http://a:1"], "router": "http://b:2"}, "x.toml: engine.sglang: workers and router are both"),
        (
            {"workers": ["a:1"]},
            "x.toml: engine.sglang.workers.0: 'a:1' is not an address: write it as http://host:port",
        ),
        ({"workers": ["http://a:99999"]}, "x.toml: engine.sglang.workers.0: 'http://a:99999' is not an address"),
        ({"workers": ["http://a:1/generate"]}, "has more than host and port"),
        ({"workers": ["http://a:1", "http://a:1/"]}, "an address is given twice"),
        ({"router": "ftp://a:1"}, "x.toml: engine.sglang.router: 'ftp://a:1' is not an address"),
        ({"router": "http://a:1", "concurrency": 0}, "x.toml: engine.sglang.concurrency = 0"),
        ({"router": "http://a:1", "concurrency": 8, "max_concurrency": 9}, "max_concurrency bounds what is found"),
        ({"router": "http://a:1", "weight_update": "maybe"}, "engine.sglang.weight_update = 'maybe'"),
        ({"router": "http://a:1", "worker": []}, "engine.sglang.worker: unknown setting; did you mean workers?"),
    ],
)
def test_a_mistake_is_told_in_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_with(**given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_servers_may_change_when_a_run_goes_on_but_not_what_they_replace() -> None:
    first, second = settings_with(workers=["http://a:1"]), settings_with(router="http://b:2", concurrency=4)
    assert first.identity() == second.identity()
    assert first.identity() != validate_settings(BASE, where="x.toml").identity()


def test_the_settings_make_an_engine_for_servers(tiny_checkpoint: Path) -> None:
    model = app.load_model(str(tiny_checkpoint))
    engine = app.build_engine(
        model, EngineSettings.model_validate({"context_length": 64, "sglang": {"router": "http://a:1"}})
    )
    assert isinstance(engine, ServerEngine)
    assert engine.context_length == 64
    assert engine.max_running_requests == 1024


OWN_TRANSPORT = """
class Told:
    def __init__(self, policy_version):
        self.policy_version = policy_version

    async def prepare(self, address, command):
        return 0

    async def load(self, address, command):
        body = {"model_path": "in place", "weight_version": str(self.policy_version)}
        await command("/update_weights_from_disk", body)
        return 0


class Teller:
    def __init__(self, context):
        assert context.checkpoint.is_dir()
        assert context.kind == "sglang"

    def meet(self, servers):
        assert [(each.num_ranks, each.model_path) for each in servers] == [(1, "m")]

    async def stage(self, update):
        return Told(update.policy_version)

    def close(self):
        pass
"""


async def test_a_transport_of_ones_own_is_chosen_by_a_setting(
    scripted: Any, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "teller.py").write_text(OWN_TRANSPORT)
    async with scripted() as (server,):
        table = {"workers": [server.address], "weights_transport": "teller.py:Teller"}
        settings = EngineSettings.model_validate({"context_length": 64, "sglang": table})
        async with app.build_engine(app.load_model(str(tiny_checkpoint)), settings, folders=[tmp_path]) as engine:
            await engine.apply(TensorUpdate({"w": np.ones(2, np.float32)}, policy_version=3))
        assert [body["model_path"] for body in server.bodies("/update_weights_from_disk")] == ["in place"]
        assert server.version == "3"


def test_a_transport_that_is_none_is_a_mistake(tiny_checkpoint: Path) -> None:
    model = app.load_model(str(tiny_checkpoint))
    table = {"workers": ["http://a:1"], "weights_transport": "pathlib:Path"}
    with pytest.raises(PluginError, match=r"engine\.sglang\.weights_transport = 'pathlib:Path'"):
        app.build_engine(model, EngineSettings.model_validate({"sglang": table}))


@pytest.mark.parametrize("by_override", [True, False])
def test_check_does_not_ask_the_servers(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], by_override: bool
) -> None:
    text = f'[model]\ncheckpoint = "{tiny_checkpoint}"\n[[prompts.environments]]\nid = "core/copy_text"\n'
    text += "[sampling]\nrollout_max_response_len = 32\n"
    address = "http://127.0.0.1:9"
    path = tmp_path / "run.toml"
    path.write_text(text if by_override else f'{text}[engine.sglang]\nworkers = ["{address}"]\n')
    override = ["--set", f'engine.sglang.workers=["{address}"]'] if by_override else []
    assert main(["check", str(path), *override]) == 0
    assert "all right" in capsys.readouterr().out
    assert main(["check", str(path), *override, "--set", f"engine.sglang.router={address}"]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1
    assert "workers and router are both given" in errors[0]
