"""Mistakes in ``[engine.openai]`` are one line each; what is right makes an engine, and a run."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rollfeed import app
from rollfeed.cli.main import main
from rollfeed.config import EngineSettings, validate_settings
from rollfeed.engine.client import ServerEngine
from rollfeed.errors import ConfigError

BASE: dict[str, Any] = {"prompts": {"environments": [{"id": "core/copy_text"}]}}
RUN = """
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

[engine.openai]
base_url = "{address}"
"""


def settings_with(**openai: Any) -> Any:
    return validate_settings({**BASE, "engine": {"openai": openai}}, where="x.toml")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {},
            "x.toml: engine: openai names no server: give base_url = address, or start some with a table [engine.",
        ),
        ({"base_url": "a:1"}, "x.toml: engine.openai.base_url: 'a:1' is not an address: write it as http://host:port"),
        ({"base_url": "http://a:99999"}, "is not an address"),
        ({"base_url": "http://a:1/v1?key=7"}, "has more than an address in it"),
        ({"base_url": "http://a:1", "concurrency": 0}, "x.toml: engine.openai.concurrency = 0"),
        ({"base_url": "http://a:1", "purpose": "fun"}, "engine.openai.purpose = 'fun'"),
        ({"base_url": "http://a:1", "modell": "m"}, "engine.openai.modell: unknown setting; did you mean model?"),
    ],
)
def test_a_mistake_is_told_in_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_with(**given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("given", [{"api_key_env": "sk-secret"}, {"base_url": "http://user:secret@a:1"}])
def test_what_may_be_a_secret_is_not_repeated(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_with(**{"base_url": "http://a:1", **given})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("text", ["http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/"])
def test_v1_at_the_end_may_be_left_out(text: str) -> None:
    assert settings_with(base_url=text).engine.openai.base_url == "http://a:1"


def test_two_kinds_of_servers_are_a_mistake() -> None:
    both = {"openai": {"base_url": "http://a:1"}, "sglang": {"workers": ["http://b:1"]}}
    with pytest.raises(ConfigError, match=r"x\.toml: engine: .*sglang.*openai"):
        validate_settings({**BASE, "engine": both}, where="x.toml")


def test_the_server_may_change_when_a_run_goes_on_but_not_what_it_replaces() -> None:
    first, second = settings_with(base_url="http://a:1"), settings_with(base_url="http://b:2", concurrency=4)
    assert first.identity() == second.identity()
    assert first.identity() != validate_settings(BASE, where="x.toml").identity()
    assert first.identity() != settings_with(base_url="http://a:1", purpose="evaluation").identity()


def test_the_settings_make_an_engine(tiny_checkpoint: Path) -> None:
    model = app.load_model(str(tiny_checkpoint))
    settings = EngineSettings.model_validate({"context_length": 64, "openai": {"base_url": "http://a:1"}})
    engine = app.build_engine(model, settings)
    assert isinstance(engine, ServerEngine)
    assert engine.context_length == 64
    assert engine.max_running_requests == 256


def test_a_key_that_is_not_there_is_a_mistake(tiny_checkpoint: Path) -> None:
    model = app.load_model(str(tiny_checkpoint))
    table = {"base_url": "http://a:1", "api_key_env": "ROLLFEED_NO_SUCH_KEY"}
    with pytest.raises(ConfigError, match=r"engine\.openai\.api_key_env = 'ROLLFEED_NO_SUCH_KEY': the environment has"):
        app.build_engine(model, EngineSettings.model_validate({"openai": table}))


@pytest.fixture
def served(vllm: Any, key_variable: str) -> Iterator[Any]:
    """The fake server, on an event loop of its own."""
    del key_variable
    started, stopped = threading.Event(), asyncio.Event()
    found: dict[str, Any] = {}

    async def serve() -> None:
        found["loop"] = asyncio.get_running_loop()
        async with vllm(key="secret-7", end_at=4) as found["server"]:
            started.set()
            await stopped.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(60)
    yield found["server"]
    found["loop"].call_soon_threadsafe(stopped.set)
    thread.join()


def test_a_run_samples_from_the_server_and_stores_no_key(
    served: Any, key_variable: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    settings, out = tmp_path / "run.toml", tmp_path / "run"
    settings.write_text(RUN.format(checkpoint=tiny_checkpoint, address=served.address))
    arguments = ["run", str(settings), "--out", str(out), "--set", f"engine.openai.api_key_env={key_variable}"]
    assert main(arguments) == 0
    rows = [row for path in sorted((out / "batches").glob("*.parquet")) for row in pq.read_table(path).to_pylist()]
    assert len(rows) == 2 * 2 * 2
    for row in rows:
        assert row["response_length"] == len(row["logprobs"]) == 5
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["engine/requests"] >= len(rows)
    assert steps[-1]["engine/rejected_replies"] == 0
    stored = b"".join(path.read_bytes() for path in out.rglob("*") if path.is_file())
    assert key_variable.encode() in stored
    assert b"secret-7" not in stored


def test_a_run_on_a_server_without_token_ids_fails_in_one_line(
    served: Any, key_variable: str, tiny_checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    served.routes, served.ids = {"/v1/completions"}, "none"
    settings = tmp_path / "run.toml"
    settings.write_text(RUN.format(checkpoint=tiny_checkpoint, address=served.address))
    key = f"engine.openai.api_key_env={key_variable}"
    assert main(["run", str(settings), "--out", str(tmp_path / "run"), "--set", key]) == 1
    told = capfd.readouterr().err.strip().splitlines()
    assert len(told) == 1
    assert "returns no token ids, so that nothing can be trained on it" in told[0]
