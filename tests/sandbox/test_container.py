from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from rollfeed.app.rewards import check_isolation
from rollfeed.config import CodeRewardSettings
from rollfeed.errors import ConfigError, SandboxError
from rollfeed.protocols import ExecLimits, ExecOutcome, IsolationLevel
from rollfeed.sandbox import Container, ContainerSandboxes, OnDemandSandboxes

LIMITS = ExecLimits(wall_seconds=60.0, memory_bytes=64 * 1024**2, max_processes=7)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a fake ``docker`` on the path and return the folder of its containers and its log."""
    state = tmp_path / "state"
    state.mkdir()
    programs = tmp_path / "programs"
    programs.mkdir()
    fake = Path(__file__).with_name("fake_engine.py")
    docker = programs / "docker"
    docker.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{fake}" "{state}" "$@"\n')
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return state


def said(state: Path) -> list[list[str]]:
    return [json.loads(line) for line in (state / "log").read_text().splitlines()]


def sandboxes() -> ContainerSandboxes:
    return ContainerSandboxes(Container(image="python:3.12-slim", memory_bytes=64 * 1024**2), max_running=2)


async def test_a_container_is_closed_off_and_removed(state: Path) -> None:
    provider = sandboxes()
    assert provider.isolation.level is IsolationLevel.CONTAINER
    assert "docker runs image python:3.12-slim" in str(provider.isolation)
    async with provider.open():
        (container,) = set(os.listdir(state)) - {"log"}
    verb, *start = said(state)[0]
    assert verb == "run"
    options = " ".join(start)
    for option in (
        "--network none",
        "--cap-drop ALL",
        "--security-opt no-new-privileges",
        "--read-only",
        "--pids-limit 32",
        f"--memory {64 * 1024**2}",
        f"--memory-swap {64 * 1024**2}",
        "--user 61061:61061",
    ):
        assert option in options
    assert said(state)[-1] == ["rm", "--force", "--volumes", container]
    assert os.listdir(state) == ["log"]


async def test_nothing_of_the_environment_is_passed_into_the_container(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RM_CASE_SECRET", "sesame")
    async with sandboxes().open() as sandbox:
        await sandbox.exec(["true"], limits=LIMITS)
    assert "sesame" not in (state / "log").read_text()
    assert "RM_CASE_SECRET" not in (state / "log").read_text()


async def test_programs_run_inside_and_everything_is_ended_after_each(state: Path) -> None:
    async with sandboxes().open() as sandbox:
        result = await sandbox.exec(["sh", "-c", "cat; echo err >&2; exit 3"], stdin=b"in", limits=LIMITS)
        assert (result.outcome, result.exit_code) == (ExecOutcome.EXITED, 3)
        assert (result.stdout, result.stderr) == (b"in", b"err\n")
        flood = await sandbox.exec(["yes"], limits=LIMITS)
        assert flood.outcome is ExecOutcome.OUTPUT_LIMIT
    kinds = ["kill" if "kill" in " ".join(entry) else entry[0] for entry in said(state)]
    assert kinds == ["run", "exec", "kill", "exec", "kill", "rm"]


async def test_killing_everything_is_for_the_containers_user_only(state: Path) -> None:
    async with sandboxes().open() as sandbox:
        await sandbox.exec(["true"], limits=LIMITS)
    (script,) = (entry[-1] for entry in said(state) if "kill" in entry[-1])
    assert script.startswith('[ "$(id -u)" = 61061 ] || exit 64;')


async def test_files_are_written_and_read(state: Path) -> None:
    async with sandboxes().open() as sandbox:
        await sandbox.write("deep/file.bin", b"\x00\xff" * 1000)
        assert await sandbox.read("deep/file.bin") == b"\x00\xff" * 1000
        await sandbox.write("-dash", b"x")
        assert await sandbox.read("-dash") == b"x"
        with pytest.raises(SandboxError, match="larger than 3"):
            await sandbox.read("deep/file.bin", max_bytes=3)
        for path in ("missing", "deep", "../up", "/etc/hostname"):
            with pytest.raises(SandboxError):
                await sandbox.read(path)


async def test_the_level_is_tried_with_a_program_and_can_be_chosen_in_settings(state: Path) -> None:
    chosen = OnDemandSandboxes(level=IsolationLevel.CONTAINER, container=Container(image="python:3.12-slim"))
    async with chosen.open() as sandbox:
        assert (await sandbox.exec(["python3", "-c", "print(7)"], limits=LIMITS)).stdout == b"7\n"
    assert chosen.isolation.level is IsolationLevel.CONTAINER
    await check_isolation(CodeRewardSettings(isolation="container"))
    (state / "broken").touch()
    with pytest.raises(ConfigError, match=r"docker with image x: .*Cannot connect to the daemon"):
        await OnDemandSandboxes(level=IsolationLevel.CONTAINER, container=Container(image="x")).start()


async def test_an_engine_that_fails_is_no_result_of_the_program(state: Path) -> None:
    (state / "broken").touch()
    with pytest.raises(SandboxError, match="Cannot connect to the daemon"):
        async with sandboxes().open():
            pass
    (state / "broken").unlink()
    async with sandboxes().open() as sandbox:
        (state / "broken").touch()
        with pytest.raises(SandboxError, match="out of order"):
            await sandbox.exec(["true"], limits=LIMITS)
        (state / "broken").unlink()


def test_an_engine_that_is_not_installed_is_said_at_once() -> None:
    with pytest.raises(ConfigError, match="no-such-engine"):
        ContainerSandboxes(Container(engine="no-such-engine", image="x"), max_running=1)
