"""Sandboxes of ``slime.agent``, and programs in them: real processes, in real sandboxes of this machine."""

import asyncio
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from rollfeed.base.serving import serve_application
from rollfeed.compat.slime_plugins.agent.harness import ClaudeCodeHarness, CodexHarness
from rollfeed.compat.slime_plugins.agent.sandboxes import (
    AgentSandbox,
    E2BSandbox,
    LocalAgentSandbox,
    ensure_agent_user,
    exec_and_wait,
    make_sandbox,
)
from rollfeed.compat.slime_plugins.shared_run import SlimeUseError
from rollfeed.errors import SandboxError

BACKEND = "SLIME_AGENT_SANDBOX_BACKEND"
LONG = 10**6 + os.getpid()
"""Seconds that nobody else sleeps."""
TAG = f"test{os.getpid()}"
E2B = """
import asyncio
import httpx

class CommandExitException(Exception):
    def __init__(self, exit_code, stdout, stderr):
        self.exit_code, self.stdout, self.stderr = exit_code, stdout, stderr

class TimeoutException(Exception):
    pass

class AsyncSandbox:
    sandbox_id, breaks, killed = "e2b-1", 0, 0

    @classmethod
    async def create(cls, *, timeout, metadata):
        cls.made = timeout, metadata
        made = cls()
        made.commands = made.files = made
        return made

    async def run(self, cmd, *, user, envs, timeout):
        if AsyncSandbox.breaks:
            AsyncSandbox.breaks -= 1
            raise httpx.ReadError("severed")
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec("bash", "-c", cmd, env={"PATH": "/usr/bin:/bin", **envs},
                                                       stdout=pipe, stderr=pipe)
        try:
            out, err = [each.decode() for each in await asyncio.wait_for(process.communicate(), timeout)]
        except TimeoutError:
            raise TimeoutException("deadline exceeded") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            raise CommandExitException(process.returncode, out, err)
        self.exit_code, self.stdout, self.stderr = 0, out, err
        return self

    async def write(self, path, content, *, user):
        with open(path, "wb") as file:
            file.write(content.read())

    async def kill(self):
        AsyncSandbox.killed += 1
"""


@pytest.fixture
async def local() -> AsyncIterator[LocalAgentSandbox]:
    async with LocalAgentSandbox("any") as sandbox:
        yield sandbox


@pytest.fixture
async def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AgentSandbox]:
    """Give a sandbox of a stand-in for E2B's package, in which processes outlive the command that starts them."""
    (tmp_path / "e2b.py").write_text(E2B)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY", "image")
    monkeypatch.delenv(BACKEND, raising=False)
    monkeypatch.delitem(sys.modules, "e2b", raising=False)
    async with make_sandbox("swe:1") as sandbox:
        yield sandbox
    sys.modules.pop("e2b")
    await asyncio.to_thread(subprocess.run, f"rm -f /tmp/.{TAG}-*.out", shell=True, check=True)


@pytest.fixture(params=["local", "remote"])
def sandbox(request: pytest.FixtureRequest, local: LocalAgentSandbox, remote: AgentSandbox) -> AgentSandbox:
    return local if request.param == "local" else remote


async def test_commands_files_and_exit_codes_are_passed(local: LocalAgentSandbox, tmp_path: Path) -> None:
    (tmp_path / "here").write_text("of this machine")
    await local.write_file("/workspace/a/one", "1")
    await local.write_file("/tmp/two", b"2")
    await local.write_file("/home/agent/three", tmp_path / "here")
    done = await local.exec(
        "cat /workspace/a/one /tmp/two ~/three; echo $X >&2; echo kept > /testbed/x", env={"X": "a 'b'"}
    )
    assert done == (0, "12of this machine", "a 'b'\n")
    assert await local.read_file("/testbed/x") == "kept\n"
    assert await local.read_file("/testbed/y") == ""
    assert (await local.exec("kill -SEGV $$"))[0] == 139
    assert (await local.exec(f"true {'x' * 200_000}; exit 3"))[0] == 3
    with pytest.raises(RuntimeError, match="false: exit code 1"):
        await local.exec("false", check=True)
    with pytest.raises(TimeoutError, match=r"sleep 60: has not ended within 0.2 s"):
        await local.exec("sleep 60", timeout=0.2)


async def test_a_command_that_takes_too_long_is_told_alike_and_is_not_the_budget_of_another(
    remote: AgentSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TimeoutError, match="sleep 60: deadline exceeded"):
        await remote.exec("sleep 60", timeout=0.2)
    run = remote._box.run  # type: ignore[attr-defined]

    async def hang(cmd: str, **given: Any) -> Any:
        return await (run("sleep 60", **{**given, "timeout": 0.5}) if cmd.startswith("cat") else run(cmd, **given))

    monkeypatch.setattr(remote._box, "run", hang)  # type: ignore[attr-defined]
    with pytest.raises(TimeoutError, match=r"cat .*: deadline exceeded"):
        await exec_and_wait(remote, cmd="true", time_budget_sec=60, tag=TAG)


async def test_a_local_sandbox_has_the_network_and_nothing_else_of_the_machine(
    local: LocalAgentSandbox, tmp_path: Path
) -> None:
    async def hello(_: web.Request) -> web.Response:
        return web.Response(text="hello")

    app = web.Application()
    app.router.add_get("/", hello)
    async with serve_application(app, host="127.0.0.1", port=0) as address:
        read = f"import urllib.request as u; print(u.urlopen('{address}').read().decode())"
        assert (await local.exec(f'python3 -c "{read}"'))[1] == "hello\n"
    assert (await local.exec(f"ls {tmp_path}"))[0] != 0
    assert (await local.exec("ls /box; touch /x; ls -d /workspace"))[1] == "/workspace\n"
    for path in ("/etc/x", "/workspace/../etc/x", "relative"):
        with pytest.raises(SandboxError):
            await local.write_file(path, "x")


async def test_a_program_cannot_put_a_link_in_the_place_of_a_folder(local: LocalAgentSandbox) -> None:
    await local.exec("rm -rf /workspace; mv /workspace /tmp/w; ln -s /etc /workspace; ln -s /etc /tmp/etc")
    assert (await local.exec("echo x > /workspace/mine; ls -d /workspace/mine; ls /tmp/etc/hostname"))[
        1
    ] == "/workspace/mine\n"
    with pytest.raises(SandboxError):
        await local.write_file("/tmp/etc/mine", "x")


async def test_nothing_is_left_of_a_local_sandbox_that_is_left_or_cancelled() -> None:
    async def work() -> None:
        async with LocalAgentSandbox() as sandbox:
            folders.append(sandbox._box._folder)  # type: ignore[attr-defined]
            await sandbox.exec(f"setsid sleep {LONG} & sleep {LONG}", timeout=1000)

    folders = list[Path]()
    task = asyncio.ensure_future(work())
    await until(lambda: bool(folders and sleepers()))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: not sleepers())
    assert not folders[0].parent.exists()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)


def sleepers() -> list[str]:
    found = subprocess.run(["ps", "-wweo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in found if line == f"sleep {LONG}"]


async def test_a_long_command_runs_to_its_end_in_its_folder(sandbox: AgentSandbox, tmp_path: Path) -> None:
    folder = "/workspace/w" if isinstance(sandbox, LocalAgentSandbox) else str(tmp_path)
    await sandbox.exec(f"mkdir -p {folder}")
    told = await exec_and_wait(
        sandbox,
        cmd="sleep 0.2\npwd; echo $A $HOME >&2; cat",
        time_budget_sec=60,
        tag=TAG,
        user="agent",
        env={"A": "a"},
        workdir=folder,
        want_output=True,
    )
    assert told == (0, f"{folder}\na /home/agent\n")
    for word in ("first", "second"):  # an equal tag is another command
        assert await exec_and_wait(sandbox, cmd=f"echo {word}; exit 7", time_budget_sec=60, tag=TAG) == (
            7,
            f"{word}\n",
        )
    out = f"{folder}/out"
    assert await exec_and_wait(sandbox, cmd="echo x", time_budget_sec=60, tag=TAG, out_file=out) == (0, "")
    assert await sandbox.read_file(out) == "x\n"
    assert (await exec_and_wait(sandbox, cmd="pwd", time_budget_sec=60, tag=TAG, workdir="/no/such"))[0] == 1
    assert (await sandbox.exec(f"ls -A /tmp | grep -c '^.{TAG}-.*[^t]$'"))[1] == "0\n"


async def test_a_command_ends_with_all_that_it_started_when_time_is_up(sandbox: AgentSandbox) -> None:
    for seconds in (1, 8, 64):  # until it had time to begin
        told = await exec_and_wait(
            sandbox, cmd=f"echo begun; sleep {LONG} & sleep {LONG}", time_budget_sec=seconds, tag=TAG
        )
        if told[1]:
            break
    assert told == (-1, "begun\n")
    await until(lambda: not sleepers())


async def test_a_command_ends_when_its_caller_is_cancelled(remote: AgentSandbox) -> None:
    task = asyncio.ensure_future(exec_and_wait(remote, cmd=f"sleep {LONG}", time_budget_sec=60, tag=TAG))
    await until(lambda: bool(sleepers()))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: not sleepers())


async def test_a_command_ends_when_its_caller_is_cancelled_while_it_is_started(
    remote: AgentSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = remote._box.run  # type: ignore[attr-defined]

    async def slow(cmd: str, **given: Any) -> Any:
        return await run(f"trap 'sleep 0.5' DEBUG; {cmd}" if "setsid" in cmd else cmd, **given)

    monkeypatch.setattr(remote._box, "run", slow)  # type: ignore[attr-defined]
    task = asyncio.ensure_future(exec_and_wait(remote, cmd=f"sleep {LONG}", time_budget_sec=60, tag=TAG))
    await until(lambda: bool(sleepers()))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: not sleepers())


async def test_a_broken_connection_is_tried_again_and_starts_nothing_twice(
    remote: AgentSandbox, tmp_path: Path
) -> None:
    package = remote._e2b.AsyncSandbox  # type: ignore[attr-defined]
    assert package.made == (3600, {"image": "swe:1"})
    package.breaks = 1
    assert await remote.exec("echo there") == (0, "there\n", "")
    real = package.run

    async def severed(self: Any, cmd: str, **others: Any) -> Any:
        done = await real(self, cmd, **others)
        if "setsid" in cmd and not hasattr(self, "was_severed"):
            self.was_severed = True
            raise httpx.ReadError("after it was started")
        return done

    package.run = severed
    await exec_and_wait(remote, cmd=f"echo once >> {tmp_path}/log", time_budget_sec=60, tag=TAG)
    assert (tmp_path / "log").read_text() == "once\n"


@pytest.mark.parametrize(
    ("backend", "error", "told"),
    [
        ("e2b", SlimeUseError, r"pip install e2b, or use make_sandbox and SLIME_AGENT_SANDBOX_BACKEND=local"),
        ("docker", SlimeUseError, r"'docker': there is e2b, local, or a class by its import path"),
        ("no_such_module.Box", Exception, "no module 'no_such_module'"),
    ],
)
def test_a_backend_that_is_not_there_is_said(
    monkeypatch: pytest.MonkeyPatch, backend: str, error: type[Exception], told: str
) -> None:
    monkeypatch.setenv(BACKEND, backend)
    with pytest.raises(error, match=told):
        make_sandbox("any")


async def test_e2b_needs_the_key_of_images(remote: AgentSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY")
    with pytest.raises(SlimeUseError, match="SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY"):
        E2BSandbox("swe:1")


def test_what_may_be_a_sandbox_is_asked_of_its_methods(local: LocalAgentSandbox) -> None:
    class Mine(AgentSandbox):
        sandbox_id = "mine"

        async def exec(self, cmd: str, **others: Any) -> tuple[int, str, str]:
            return 0, cmd, ""

    assert isinstance(Mine(), AgentSandbox)
    assert isinstance(local, AgentSandbox)
    assert not isinstance(Recorded(), AgentSandbox)


def test_a_sandbox_may_be_a_class_of_one_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND, "types.SimpleNamespace")
    monkeypatch.setattr("types.SimpleNamespace", lambda image: ("mine", image))
    assert make_sandbox("i") == ("mine", "i")


PROGRAM = """#!/bin/bash
printf '%s\\n' "$@" > args
env > env
cat ~/.claude.json ~/.claude/settings.json ~/.codex/config.toml 2> /dev/null
exit 5
"""


@pytest.mark.parametrize(
    ("kind", "variable", "first", "needs"),
    [
        (
            ClaudeCodeHarness,
            "SLIME_AGENT_CC",
            ["-p", "it's\n$HOME", "--permission-mode", "bypassPermissions"],
            {"ANTHROPIC_BASE_URL": "http://h:1", "ANTHROPIC_AUTH_TOKEN": "sid", "ANTHROPIC_MODEL": "slime-actor"},
        ),
        (
            CodexHarness,
            "SLIME_AGENT_CODEX",
            ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"],
            {"OPENAI_BASE_URL": "http://h:1/v1", "OPENAI_API_KEY": "sid"},
        ),
    ],
)
async def test_a_harness_configures_and_runs_its_program(
    local: LocalAgentSandbox, monkeypatch: pytest.MonkeyPatch, kind: Any, variable: str, first: list[str], needs: Any
) -> None:
    changed = {list(needs)[-1]: "another", "MINE": "1"}
    monkeypatch.setenv(f"{variable}_EXTRA_ENVS", json.dumps({"PATH": "/home/agent/bin:/usr/bin:/bin", **changed}))
    monkeypatch.setenv(f"{variable}_EXTRA_ARGS", "--extra arg")
    harness = kind()
    await local.write_file(f"/home/agent/bin/{harness.program}", PROGRAM)
    await local.exec(f"chmod +x ~/bin/{harness.program}")
    code = await harness.run(
        local,
        workdir="/workspace/repo",
        session_id="sid",
        adapter_url="http://h:1",
        time_budget_sec=60,
        prompt="it's\n$HOME",
    )
    assert code == 5
    args = await local.read_file("/workspace/repo/args")
    assert args.startswith("\n".join(first))
    assert "it's\n$HOME\n" in args
    assert args.endswith("--extra\narg\n")
    env = dict(
        line.split("=", 1) for line in (await local.read_file("/workspace/repo/env")).splitlines() if "=" in line
    )
    assert env.items() >= {**needs, **changed, "HOME": "/home/agent"}.items()
    config = await local.read_file("/workspace/repo/.harness/trajectory.jsonl")
    if kind is CodexHarness:
        told = tomllib.loads(config)
        provider = told["model_providers"][told["model_provider"]]
        assert (provider["base_url"], provider["wire_api"]) == ("http://h:1/v1", "responses")
    else:
        assert config.count('"bypassPermissionsModeAccepted": true') == 2


async def test_a_program_that_is_not_in_the_sandbox_needs_archives(
    local: LocalAgentSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLIME_AGENT_NODE_TARBALL", raising=False)
    monkeypatch.setattr(ClaudeCodeHarness, "program", "no-such-program")
    with pytest.raises(SlimeUseError, match="set SLIME_AGENT_NODE_TARBALL and SLIME_AGENT_CC_TARBALL"):
        await ClaudeCodeHarness().install_cli(local)


class Recorded:
    """Keeps the commands that it is given."""

    def __init__(self, missing: str = "") -> None:
        self.commands, self.files, self.missing = list[tuple[str, str]](), dict[str, Any](), missing

    async def exec(self, cmd: str, *, user: str = "root", **others: Any) -> tuple[int, str, str]:
        self.commands.append((user, cmd))
        return (1 if self.missing and self.missing in cmd else 0), "", ""

    async def write_file(self, path: str, content: Any, *, user: str = "root") -> None:
        self.files[path] = content


async def test_archives_are_installed_where_a_program_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_AGENT_NODE_TARBALL", "/a/node.tar.xz")
    monkeypatch.setenv("SLIME_AGENT_CODEX_TARBALL", "/a/codex.tgz")
    there, absent = Recorded(), Recorded(missing="command -v codex")
    for each in (there, absent):
        await CodexHarness().install_cli(each)  # type: ignore[arg-type]
    assert there.files == {}
    assert [str(path) for path in absent.files.values()] == ["/a/node.tar.xz", "/a/codex.tgz"]
    user, install = absent.commands[-1]
    assert user == "root"
    assert install.index("tar xf") < install.index("npm install -g") < install.index("codex --version")


async def test_an_agent_s_user_owns_its_folder_where_there_are_users() -> None:
    sandbox = Recorded()
    await ensure_agent_user(sandbox, "/work dir")  # type: ignore[arg-type]
    ((user, command),) = sandbox.commands
    assert user == "root"
    assert "useradd -m -s /bin/bash agent" in command
    assert "chown -R agent:agent /home/agent '/work dir'" in command
