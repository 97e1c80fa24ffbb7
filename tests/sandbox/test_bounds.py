"""What a program may take of memory and disk, by whatever way, is bounded as it takes it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from rollfeed.errors import SandboxError
from rollfeed.protocols import ExecLimits, ExecOutcome, ExecResult
from rollfeed.sandbox import LocalSandboxes, start_sandboxes
from rollfeed.sandbox.cgroups import Cgroups, find_cgroups
from rollfeed.sandbox.own_mounts import find_own_mounts

MiB = 1024**2
LIMITS = ExecLimits(wall_seconds=60.0, memory_bytes=256 * MiB, max_file_bytes=8 * MiB, max_files=100)


async def run(sandboxes: LocalSandboxes, program: str, *, limits: ExecLimits = LIMITS) -> ExecResult:
    async with sandboxes.open() as sandbox:
        await sandbox.write("main.py", program.encode())
        return await sandbox.exec(["python3", "-I", "-S", "main.py"], limits=limits)


async def answer(sandboxes: LocalSandboxes, program: str, *, limits: ExecLimits = LIMITS) -> Any:
    result = await run(sandboxes, program, limits=limits)
    assert result.exit_code == 0, (result.outcome, result.stderr[-1000:])
    return json.loads(result.stdout)


@pytest.fixture
async def bounded(sandboxes: LocalSandboxes) -> LocalSandboxes:
    """Sandboxes on file systems of their own."""
    if isinstance(reason := find_own_mounts(), str):
        pytest.skip(f"files are bounded by looking at them: {reason}")
    return sandboxes


@pytest.fixture
def groups() -> Cgroups:
    """What makes control groups."""
    if isinstance(found := find_cgroups(), str):
        pytest.skip(f"memory is bounded by looking at it: {found}")
    return found


async def test_x21_disk_cannot_be_reserved(sandboxes: LocalSandboxes) -> None:
    program = """
import ctypes, json, os
libc = ctypes.CDLL(None, use_errno=True)
file = os.open("large", os.O_CREAT | os.O_RDWR)
taken = []
for flags in (0, 1, 3, 16):  # 1: keep size
    libc.fallocate(file, flags, ctypes.c_long(0), ctypes.c_long(27 << 30))
    taken.append(os.fstat(file).st_blocks * 512)
try:
    os.posix_fallocate(file, 0, 27 << 30)
except OSError:
    pass
print(json.dumps([*taken, os.fstat(file).st_blocks * 512]))
"""
    assert max(await answer(sandboxes, program)) <= LIMITS.max_file_bytes


WRITE_ALL = """
import json, os
written = {}
for folder in ("/box", "/tmp", "/dev/shm"):
    written[folder] = 0
    try:
        for number in range(30):
            with open(f"{folder}/{number}", "wb", buffering=0) as file:
                written[folder] += file.write(bytes(1 << 20))
    except OSError:
        pass
print(json.dumps(written))
"""


async def test_x21_folders_hold_their_limit_and_not_a_byte_more(bounded: LocalSandboxes) -> None:
    written = await answer(bounded, WRITE_ALL)
    assert written["/box"] < LIMITS.max_file_bytes  # as it has the program, too
    assert written["/tmp"] + written["/dev/shm"] <= LIMITS.max_file_bytes
    assert written["/tmp"] > 0


async def test_x22_empty_files_are_bounded_as_they_are_made(bounded: LocalSandboxes) -> None:
    program = """
import json, os
made = {}
for folder in ("/box", "/tmp", "/dev/shm"):
    made[folder] = 0
    try:
        while made[folder] < 500_000:
            os.close(os.open(f"{folder}/{made[folder]}", os.O_CREAT | os.O_WRONLY))
            made[folder] += 1
    except OSError:
        pass
print(json.dumps(made))
"""
    made = await answer(bounded, program)
    assert made["/box"] == LIMITS.max_files - 1  # as there is the program
    assert made["/tmp"] + made["/dev/shm"] == LIMITS.max_files


async def test_x22_files_that_only_a_socket_holds_stay_within_their_folders(bounded: LocalSandboxes) -> None:
    program = """
import array, json, os, socket
left, right = socket.socketpair()
sent = 0
try:
    while sent < 64:
        file = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)
        os.write(file, bytes(1 << 20))
        left.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file]))])
        os.close(file)
        sent += 1
except OSError:
    pass
print(json.dumps(sent))
"""
    assert 0 < await answer(bounded, program) <= LIMITS.max_file_bytes // MiB


@pytest.mark.parametrize(
    "take",
    ["mmap.mmap(-1, 60 << 20)", "mmap.mmap(-1, 60 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)"],
    ids=["shared", "private"],
)
async def test_x22_memory_of_all_processes_and_kinds_counts(sandboxes: LocalSandboxes, take: str) -> None:
    program = f"""
import mmap, os, signal
for _ in range(10):
    if os.fork() == 0:
        held = {take}
        for place in range(0, len(held), 4096):
            held[place] = 1
        signal.pause()
signal.pause()
"""
    result = await run(sandboxes, program)
    assert result.outcome is ExecOutcome.MEMORY_LIMIT


async def test_x22_files_in_memory_count_as_memory(bounded: LocalSandboxes, groups: Cgroups) -> None:
    program = """
import signal
for folder in ("/box", "/tmp"):
    with open(f"{folder}/large", "wb") as file:
        for _ in range(55):
            file.write(bytes(1 << 20))
held = bytearray(40 << 20)
held[::4096] = b"x" * len(held[::4096])
signal.pause()
"""
    limits = ExecLimits(wall_seconds=60.0, memory_bytes=128 * MiB, max_file_bytes=64 * MiB)
    assert (await run(bounded, program, limits=limits)).outcome is ExecOutcome.MEMORY_LIMIT


async def test_x22_a_program_that_the_kernel_ends_for_its_memory_is_told_so(
    sandboxes: LocalSandboxes, groups: Cgroups
) -> None:
    program = """
import mmap, os
for _ in range(10):
    if os.fork() == 0:
        held = mmap.mmap(-1, 60 << 20)
        for place in range(0, len(held), 4096):
            held[place] = 1
        while True:
            pass
os.waitpid(-1, 0)
"""
    assert (await run(sandboxes, program)).outcome is ExecOutcome.MEMORY_LIMIT


async def test_a_sandbox_whose_files_are_its_own_reads_and_keeps_them(bounded: LocalSandboxes, tmp_path: Path) -> None:
    async with bounded.open() as sandbox:
        (folder,) = (tmp_path / "scratch").iterdir()
        await sandbox.write("deep/in.txt", b"one")
        result = await sandbox.exec(["sh", "-c", "cat deep/in.txt; touch /tmp/x; echo two > out"], limits=LIMITS)
        assert result.stdout == b"one"
        result = await sandbox.exec(["sh", "-c", "cat out; ls /tmp"], limits=LIMITS)
        assert (result.stdout, await sandbox.read("out")) == (b"two\n", b"two\n")
        assert os.listdir(folder / "box") == []  # the machine has none of it
        mounted = Path("/proc/self/mountinfo").read_text()  # noqa: ASYNC240
        assert str(folder) not in mounted


async def test_without_file_systems_of_their_own_folders_are_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = (await start_sandboxes(scratch=tmp_path)).isolation
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bwrap", "unshare", "setpriv"):
        if (program := shutil.which(name)) is not None:
            (programs / name).symlink_to(program)
    monkeypatch.setenv("PATH", str(programs))  # so that there is no nsenter
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    sandboxes = await start_sandboxes(level=found.level, scratch=scratch)
    assert "file systems of their own" in str(sandboxes.isolation)
    assert isinstance(sandboxes, LocalSandboxes)
    many = "import signal\nfor n in range(200): open(str(n), 'w').close()\nsignal.pause()"
    assert (await run(sandboxes, many)).outcome is ExecOutcome.FILE_LIMIT
    with pytest.raises(SandboxError, match="cannot be read"):
        async with sandboxes.open() as sandbox:
            await sandbox.read("missing")
