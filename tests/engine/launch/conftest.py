"""Launched stand-ins, and what of them is left."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.sglang.conftest import FAST

from rollfeed.config import LaunchSettings, SGLangSettings
from rollfeed.engine.dialects import SGLang
from rollfeed.engine.launch import KINDS, LaunchedEngine, LaunchedModel, ServerLauncher, server_commands
from rollfeed.testing import CharTokenizer
from rollfeed.weights import DiskTransport

STAND_IN = (sys.executable, str(Path(__file__).parent / "stand_in.py"))
ROOT = Path(__file__).parents[3]
LAUNCHED = {"startup_timeout_seconds": 300.0, "command": STAND_IN}
PATIENT = {"probe_timeout_seconds": 60.0, "request_timeout_seconds": 300.0, "startup_timeout_seconds": 60.0}
"""A server that is only slow is not dead; one that is dead refuses connections."""


def marked(mark: str) -> list[int]:
    """Processes whose environment has a word."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def wait_until(condition: Callable[[], Any], seconds: float = 120.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.05)
    return found


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    """A word in the environment of every server of a test, none of which may be left at its end."""
    word = f"STAND_IN_OF={tmp_path}"
    yield word
    wait_until(lambda: not marked(word))


@pytest.fixture
def launcher_of(tmp_path: Path, mark: str) -> Callable[..., ServerLauncher]:
    def make(kind: str = "sglang", **given: Any) -> ServerLauncher:
        name, _, value = mark.partition("=")
        env = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), name: value}
        settings = LaunchSettings.model_validate({**LAUNCHED, "env": env, **given})
        model = LaunchedModel(tmp_path / "model", name="policy", context_length=512)
        launcher = ServerLauncher(server_commands(settings, KINDS[kind], model), settings)
        launcher.log_folder = tmp_path / "servers"
        return launcher

    return make


@pytest.fixture
def engine_of(launcher_of: Callable[..., ServerLauncher]) -> Callable[..., LaunchedEngine]:
    def make(*, sglang: dict[str, Any] | None = None, **given: Any) -> LaunchedEngine:
        launcher = launcher_of(**given)
        settings = SGLangSettings(**{**FAST, **PATIENT, **(sglang or {})}).at(launcher.addresses)
        return LaunchedEngine(
            launcher,
            SGLang(settings),
            context_length=512,
            tokenizer=CharTokenizer(),
            transport=DiskTransport(),
        )

    return make
