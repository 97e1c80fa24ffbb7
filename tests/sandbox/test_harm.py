"""What a program of a model may try, at the isolation level in force and at the next one."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollfeed.protocols import ExecLimits, ExecOutcome, ExecResult
from rollfeed.sandbox import LocalSandboxes

MiB = 1024**2
LIMITS = ExecLimits(wall_seconds=20.0, memory_bytes=256 * MiB, max_processes=16, max_file_bytes=8 * MiB)
SHORT = ExecLimits(wall_seconds=2.0, patience=60.0, memory_bytes=256 * MiB, max_processes=16, max_file_bytes=8 * MiB)


async def run(sandboxes: LocalSandboxes, program: str, *args: str, limits: ExecLimits = LIMITS) -> ExecResult:
    async with sandboxes.open() as sandbox:
        await sandbox.write("main.py", program.encode())
        return await sandbox.exec(["python3", "-I", "-S", "main.py", *args], limits=limits)


async def answer(sandboxes: LocalSandboxes, program: str, *args: str, limits: ExecLimits = LIMITS) -> Any:
    result = await run(sandboxes, program, *args, limits=limits)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


async def test_escape_files_outside_cannot_be_written(sandboxes: LocalSandboxes, tmp_path: Path) -> None:
    program = """
import json, os, sys
written = []
for path in sys.argv[1:]:
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        open(path, "w").write("x")
        written.append(path)
    except OSError:
        pass
print(json.dumps(written))
"""
    name = f"rollfeed-escape-{os.getpid()}"
    outside = [f"/tmp/{name}", str(tmp_path / name), f"/usr/{name}", f"/{name}", f"/etc/{name}", f"/dev/{name}"]
    written = await answer(sandboxes, program, *outside)
    # Its own temporary folder it may write, and that is gone with it.
    assert [path for path in written if not path.startswith("/tmp/")] == []
    assert not [path for path in outside if await asyncio.to_thread(os.path.exists, path)]


async def test_escape_secrets_outside_cannot_be_read(sandboxes: LocalSandboxes, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("sesame")
    program = """
import json, os, sys
seen = [path for path in sys.argv[1:] if os.path.exists(path)]
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in ("cwd", "root"):
        path = f"/proc/{pid}/{name}{sys.argv[1]}"
        if os.path.exists(path):
            seen.append(path)
print(json.dumps(seen))
"""
    secrets = [str(secret), "/etc/passwd", "/etc/shadow", "/root/.bashrc", "/home", "/sys/kernel", "/run", "/var"]
    assert await answer(sandboxes, program, *secrets) == []


async def test_escape_other_processes_cannot_be_seen_or_killed(sandboxes: LocalSandboxes) -> None:
    program = """
import json, os, signal
seen = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
for pid in {os.getppid(), 1, *range(2, 400)} - {os.getpid(), 0}:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
try:
    os.kill(-1, signal.SIGTERM)
except OSError:
    pass
print(json.dumps(seen))
"""
    # Itself, and the first process of its own process namespace.
    assert len(await answer(sandboxes, program)) <= 2


async def test_escape_there_are_no_privileges_to_use(sandboxes: LocalSandboxes) -> None:
    program = """
import json
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
print(json.dumps([int(status["CapEff"], 16), int(status["CapPrm"], 16), int(status["NoNewPrivs"])]))
"""
    assert await answer(sandboxes, program) == [0, 0, 1]


async def test_escape_descriptors_of_this_process_are_not_passed_on(sandboxes: LocalSandboxes, tmp_path: Path) -> None:
    program = "import json, os; print(json.dumps(sorted(map(int, os.listdir('/proc/self/fd')))[:-1]))"
    with open(tmp_path / "open", "w") as file:  # noqa: ASYNC230
        os.set_inheritable(file.fileno(), True)
        assert await answer(sandboxes, program) == [0, 1, 2]


async def test_fork_bomb_is_capped_and_leaves_nothing(
    sandboxes: LocalSandboxes, processes_with: Callable[[str], list[int]], zombies: Callable[[], list[int]]
) -> None:
    program = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
    marker = f"fork-bomb-{os.getpid()}"
    result = await run(sandboxes, program, marker, limits=SHORT)
    assert result.outcome is ExecOutcome.TIMEOUT
    assert processes_with(marker) == []
    assert zombies() == []


async def test_fork_bomb_cannot_have_more_processes_than_allowed(sandboxes: LocalSandboxes) -> None:
    program = """
import json, os, signal
count = 1
try:
    while True:
        if os.fork() == 0:
            signal.pause()
        count += 1
except OSError:
    print(json.dumps(count))
"""
    assert 2 <= await answer(sandboxes, program) <= LIMITS.max_processes


async def test_memory_bomb_of_one_process_fails_inside(sandboxes: LocalSandboxes) -> None:
    result = await run(sandboxes, "x = [0] * (10 ** 10)")
    assert result.exit_code == 1
    assert b"MemoryError" in result.stderr


async def test_memory_bomb_of_many_processes_is_stopped(sandboxes: LocalSandboxes) -> None:
    program = """
import os, signal
for _ in range(6):
    if os.fork() == 0:
        held = bytearray(100 << 20)
        held[::4096] = b"x" * len(held[::4096])
        signal.pause()
signal.pause()
"""
    result = await run(sandboxes, program)
    assert result.outcome is ExecOutcome.MEMORY_LIMIT


async def test_memory_bomb_in_the_temporary_folder_is_stopped(sandboxes: LocalSandboxes) -> None:
    program = """
import json
written = 0
try:
    for number in range(100):
        with open(f"/tmp/{number}", "wb", buffering=0) as file:
            written += file.write(bytes(1 << 20))
except OSError:
    pass
print(json.dumps(written))
"""
    assert await answer(sandboxes, program) <= LIMITS.max_file_bytes


@pytest.mark.parametrize("make", ["os.open('/tmp', os.O_TMPFILE | os.O_RDWR)", "nameless()"])
async def test_memory_and_file_bombs_in_files_without_a_name_are_stopped(sandboxes: LocalSandboxes, make: str) -> None:
    program = f"""
import os, signal
def nameless():
    file = os.open("file", os.O_CREAT | os.O_RDWR)
    os.unlink("file")
    return file
held = []
try:
    for _ in range(20):
        held.append({make})
        os.write(held[-1], bytes(1 << 20))
except OSError:
    raise SystemExit(1)
signal.pause()
"""
    result = await run(sandboxes, program)
    # Where the folders are file systems of their own, they give no more than their size.
    assert result.outcome is ExecOutcome.FILE_LIMIT or result.exit_code == 1


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_output_flood_is_cut_off(sandboxes: LocalSandboxes, stream: str) -> None:
    program = f"import sys\nwhile True: print('y' * 10000, file=sys.{stream})"
    result = await run(sandboxes, program)
    assert result.outcome is ExecOutcome.OUTPUT_LIMIT
    assert len(result.stdout) <= LIMITS.max_output_bytes
    assert len(result.stderr) <= LIMITS.max_output_bytes
    assert max(len(result.stdout), len(result.stderr)) == LIMITS.max_output_bytes


async def test_file_flood_is_stopped_by_size_and_by_number(sandboxes: LocalSandboxes) -> None:
    large = "while True: open('large', 'ab').write(bytes(1 << 20))"
    result = await run(sandboxes, large)
    assert result.outcome in (ExecOutcome.EXITED, ExecOutcome.FILE_LIMIT)
    assert result.exit_code != 0
    many = "n = 0\nwhile True:\n    open(f'f{n}', 'wb').write(bytes(1 << 16))\n    n += 1"
    result = await run(sandboxes, many)
    assert result.outcome is ExecOutcome.FILE_LIMIT or b"No space left" in result.stderr


async def test_zombie_children_do_not_outlive_the_program(
    sandboxes: LocalSandboxes, processes_with: Callable[[str], list[int]], zombies: Callable[[], list[int]]
) -> None:
    program = """
import os, sys, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
if os.fork() == 0:
    os._exit(0)
print("done", flush=True)
"""
    marker = f"zombie-{os.getpid()}"
    result = await run(sandboxes, program, marker)
    assert (result.outcome, result.exit_code, result.stdout) == (ExecOutcome.EXITED, 0, b"done\n")
    assert processes_with(marker) == []
    assert zombies() == []


async def test_environment_does_not_leak(sandboxes: LocalSandboxes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RM_CASE_SECRET", "sesame")
    program = """
import json, os
texts = [json.dumps(dict(os.environ))]
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in ("environ", "cmdline"):
        try:
            texts.append(open(f"/proc/{pid}/{name}", errors="replace").read())
        except OSError:
            pass
print(json.dumps(texts))
"""
    texts = await answer(sandboxes, program)
    assert "sesame" not in "".join(texts)
    assert set(json.loads(texts[0])) <= {
        *("PATH", "HOME", "TMPDIR", "LANG", "LC_CTYPE", "PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS"),
        *("OPENBLAS_NUM_THREADS", "ROLLFEED_SANDBOX"),
    }


async def test_network_cannot_be_reached(sandboxes: LocalSandboxes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = """
import json, socket, sys
reached = []
for address in (("127.0.0.1", int(sys.argv[1])), ("192.0.2.1", 80)):
    try:
        socket.create_connection(address, timeout=2).close()
        reached.append(address)
    except OSError:
        pass
print(json.dumps([reached, [name for _, name in socket.if_nameindex()]]))
"""
        assert await answer(sandboxes, program, str(server.getsockname()[1])) == [[], ["lo"]]


async def test_network_abstract_sockets_of_the_machine_cannot_be_reached(sandboxes: LocalSandboxes) -> None:
    name = f"rollfeed-{os.getpid()}-{threading.get_ident()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{name}")
        server.listen()
        program = """
import json, socket, sys
with socket.socket(socket.AF_UNIX) as client:
    try:
        client.connect(chr(0) + sys.argv[1])
        print("true")
    except OSError:
        print("false")
"""
        assert await answer(sandboxes, program, name) is False


async def test_endless_loop_is_ended_at_its_time_limit(
    sandboxes: LocalSandboxes, processes_with: Callable[[str], list[int]]
) -> None:
    marker = f"loop-{os.getpid()}"
    program = "print('begun', flush=True)\nwhile True: pass"
    result = await run(sandboxes, program, marker, limits=ExecLimits(wall_seconds=1.0, patience=60.0))
    assert (result.outcome, result.exit_code, result.stdout) == (ExecOutcome.TIMEOUT, None, b"begun\n")
    assert processes_with(marker) == []


async def test_cancelled_program_is_ended(
    sandboxes: LocalSandboxes, processes_with: Callable[[str], list[int]], zombies: Callable[[], list[int]]
) -> None:
    marker = f"cancelled-{os.getpid()}"
    running = asyncio.create_task(run(sandboxes, "import time; time.sleep(600)", marker))
    await asyncio.sleep(0.3)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert processes_with(marker) == []
    assert zombies() == []
