from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rollfeed.errors import ConfigError
from rollfeed.protocols import ExecLimits, Isolation, IsolationLevel
from rollfeed.sandbox import start_sandboxes
from rollfeed.sandbox.choosing import judge
from rollfeed.sandbox.launcher import refuse_outside
from rollfeed.sandbox.wrapping import interpreter, system_mounts

SYSTEM_PYTHON = Path("/usr/bin/python3")
NOBODY = "65534"


def bubblewrap_works() -> bool:
    """Say so without any of our own code."""
    if shutil.which("bwrap") is None:
        return False
    command = ["bwrap", "--ro-bind", "/", "/", "--unshare-pid", "--unshare-net", "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def link_programs(folder: Path, *names: str) -> str:
    for name in names:
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    return str(folder)


async def test_the_level_does_not_silently_drop_below_bubblewrap() -> None:
    if os.environ.get("CI"):
        assert bubblewrap_works(), "CI has to install bubblewrap"
    elif not bubblewrap_works():
        pytest.skip("bubblewrap is not installed, or does not work here")
    isolation = (await start_sandboxes()).isolation
    assert isolation.level is IsolationLevel.BUBBLEWRAP
    assert isolation.network_cut
    assert isolation.files_hidden


async def test_the_level_can_be_stored_and_is_said_plainly() -> None:
    isolation = (await start_sandboxes()).isolation
    assert json.loads(json.dumps(asdict(isolation)))["level"] == isolation.level.value
    assert f"isolation level {isolation.level.value} (no network, own files only)" in str(isolation)


async def test_without_bubblewrap_the_kernels_namespaces_are_used_and_the_reason_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", link_programs(tmp_path, "unshare", "setpriv"))
    isolation = (await start_sandboxes()).isolation
    assert isolation.level is IsolationLevel.NAMESPACES
    assert "not available: bubblewrap: bwrap is not installed" in str(isolation)


async def test_x24_without_a_barrier_nothing_is_run_unless_that_is_asked_for_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"bwrap is not installed.*unshare is not installed") as raised:
        await start_sandboxes()
    said = str(raised.value)
    assert "limits:" not in said  # it was not even tried
    assert all(way in said for way in ("install bubblewrap", "container", '"limits", only by that name'))


def test_x24_what_a_level_does_not_give_is_said_where_it_is_stored() -> None:
    held = {"forks": 5, "memory_limited": True, "interfaces": ["lo"], "sees_canary": [], "processes": 2}
    isolation = judge(IsolationLevel.BUBBLEWRAP, {**held, "calls_filtered": True})
    assert "not given: a kernel of their own" in str(isolation)
    assert "filter" not in str(isolation)
    assert "a filter of system calls" in str(judge(IsolationLevel.NAMESPACES, {**held, "calls_filtered": False}))
    limits = judge(IsolationLevel.LIMITS, {**held, "calls_filtered": True, "interfaces": ["lo", "eth0"]})
    assert "NETWORK OPEN, MACHINE'S FILES VISIBLE" in str(limits)
    assert "not given: a barrier" in str(limits)


async def test_a_bubblewrap_that_does_not_isolate_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\nexit 0\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="was not reached"):
        await start_sandboxes(level=IsolationLevel.BUBBLEWRAP)


# Pure comparisons: nothing here may ever run the launcher itself outside of namespaces of its own.
def test_the_launcher_refuses_to_work_in_the_machines_mount_namespace() -> None:
    with pytest.raises(PermissionError, match="mount namespace"):
        refuse_outside(os.readlink("/proc/self/ns/mnt"))


def test_the_launcher_refuses_to_work_in_the_machines_process_namespace() -> None:
    with pytest.raises(PermissionError, match="process namespace"):
        refuse_outside("mnt:[1]")


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        ({"forks": 20}, "processes are not limited"),
        ({"forks": 0}, "processes are not limited"),
        ({"memory_limited": False}, "memory is not limited"),
        ({"interfaces": ["lo", "eth0"]}, "the network is reachable"),
        ({"sees_canary": ["/home/a/x"]}, "the machine's files are visible: /home/a"),
        ({"processes": 3}, "the machine's processes are visible"),
    ],
)
def test_a_level_that_does_not_hold_what_it_promises_is_refused(seen: dict[str, Any], said: str) -> None:
    held = {"forks": 5, "memory_limited": True, "interfaces": ["lo"], "sees_canary": [], "processes": 2}
    held["calls_filtered"] = True
    assert isinstance(judge(IsolationLevel.BUBBLEWRAP, held), Isolation)
    assert said in str(judge(IsolationLevel.BUBBLEWRAP, {**held, **seen}))


async def test_a_level_that_is_insisted_on_is_not_replaced_by_a_weaker_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="bwrap is not installed"):
        await start_sandboxes(level=IsolationLevel.BUBBLEWRAP)
    with pytest.raises(ConfigError, match="container"):
        await start_sandboxes(level=IsolationLevel.CONTAINER)


LEVELS_SCRIPT = """
import asyncio, json, os, sys, time
from rollfeed.protocols import ExecLimits, IsolationLevel
from rollfeed.sandbox import start_sandboxes

ESCAPE = '''
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
os.wait()
time.sleep(0.2)
print(sum(map(int, input().split())))
'''

async def main():
    seen = {}
    for level in (None, IsolationLevel.NAMESPACES, IsolationLevel.LIMITS):
        sandboxes = await start_sandboxes(level=level)
        async with sandboxes.open() as sandbox:
            await sandbox.write("main.py", ESCAPE.encode())
            command = ["python3", "-I", "-S", "main.py", f"survivor-{os.getpid()}"]
            result = await sandbox.exec(command, stdin=b"2 3", limits=ExecLimits(wall_seconds=20.0))
        seen[str(level)] = [str(sandboxes.isolation), result.exit_code, result.stdout.decode()]
    for _ in range(1_200):
        survivors = [pid for pid in os.listdir("/proc") if pid.isdigit() and is_survivor(pid)]
        if not survivors:
            break
        time.sleep(0.05)
    print(json.dumps([seen, survivors]))

def is_survivor(pid):
    try:
        return f"survivor-{os.getpid()}" in open(f"/proc/{pid}/cmdline").read()
    except OSError:
        return False

asyncio.run(main())
"""


def run_with_system_python(*prefix: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [*prefix, str(SYSTEM_PYTHON)]
    version = f"import sys, numpy, msgspec, rollfeed.sandbox; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
    if subprocess.run([*command, "-c", version], env=environment, capture_output=True, check=False).returncode:
        pytest.skip("the system has no interpreter that this user can run these modules with")
    return subprocess.run(
        [*command, "-c", LEVELS_SCRIPT], env=environment, capture_output=True, text=True, check=False, cwd="/"
    )


@pytest.mark.parametrize("user", ["root", "another"])
async def test_every_level_works_as_root_and_as_another_user(user: str) -> None:
    if os.geteuid() != 0 or not bubblewrap_works():
        pytest.skip("needs root, to be another user, and bubblewrap")
    prefix = ["setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"] if user == "another" else []
    ran = await asyncio.to_thread(run_with_system_python, *prefix)
    assert ran.returncode == 0, ran.stderr
    seen, survivors = json.loads(ran.stdout)
    assert [(exit_code, output) for _, exit_code, output in seen.values()] == [(0, "5\n")] * 3
    assert "level bubblewrap (no network, own files only)" in seen["None"][0]
    assert "level namespaces (no network, own files only)" in seen["namespaces"][0]
    assert "level limits (NETWORK OPEN, MACHINE'S FILES VISIBLE)" in seen["limits"][0]
    assert survivors == []


IMPORTS = """
import ctypes, json, os, sqlite3, ssl, sys, zlib
print(json.dumps([os.path.exists(path) for path in sys.argv[1:]]))
"""


async def test_x25_an_interpreter_below_home_shows_nothing_else_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = Path(interpreter()).parents[1]
    if prefix.is_relative_to("/usr"):
        pytest.skip("the interpreter is the system's")
    monkeypatch.setenv("HOME", str(prefix))  # as where it is installed by --prefix=$HOME
    system_mounts.cache_clear()
    try:
        sandboxes = await start_sandboxes(scratch=tmp_path)
        async with sandboxes.open() as sandbox:
            hidden = [str(prefix / "include"), str(prefix / "share"), str(tmp_path)]
            command = ["python3", "-I", "-S", "-c", IMPORTS, *hidden]
            result = await sandbox.exec(command, limits=ExecLimits(wall_seconds=60.0))
        assert json.loads(result.stdout) == [False, False, False], result.stderr
        assert not {mount.at for mount in system_mounts()} & {str(folder) for folder in [prefix, *prefix.parents]}
    finally:
        system_mounts.cache_clear()


@pytest.mark.parametrize("where", ["home", "working", "private"])
async def test_x25_a_folder_that_programs_could_see_is_found_before_one_runs(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs a folder of its own below /usr, of which programs see all")
    with tempfile.TemporaryDirectory(dir="/usr/local") as seen:
        await asyncio.to_thread(os.chmod, seen, 0o755)
        if where == "home":
            monkeypatch.setenv("HOME", seen)
        if where == "working":
            monkeypatch.chdir(seen)
        private = [Path(seen)] if where == "private" else []
        with pytest.raises(ConfigError, match=f"files are visible: {seen}"):
            await start_sandboxes(scratch=tmp_path, private=private)
        assert os.listdir(seen) == []


async def test_x25_files_of_a_trial_that_was_killed_go_at_the_next_start(tmp_path: Path) -> None:
    for name in (".rollfeed-canary-old", ".rollfeed-canary-new", "other"):
        (tmp_path / name).touch()
    for name in (".rollfeed-canary-old", "other"):
        os.utime(tmp_path / name, (0, 0))
    await start_sandboxes(private=[tmp_path])
    assert sorted(os.listdir(tmp_path)) == [".rollfeed-canary-new", "other"]  # another's trial
