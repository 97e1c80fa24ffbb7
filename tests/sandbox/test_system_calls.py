"""What the kernel is asked for by programs: refused at every level, and nothing that ordinary programs need."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from rollfeed.protocols import ExecLimits, ExecResult
from rollfeed.sandbox import LocalSandboxes, system_calls
from rollfeed.sandbox.system_calls import seccomp_filter

LIMITS = ExecLimits(wall_seconds=60.0, memory_bytes=2 << 30, max_processes=32)
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NEW_NAMESPACES = {
    **{"mnt": 0x20000, "cgroup": 0x2000000, "uts": 0x4000000, "ipc": 0x8000000},
    **{"user": 0x10000000, "pid": 0x20000000, "net": 0x40000000},
}
NEW_TIME = 0x80
REFUSED_FAMILIES = {"AX25": 3, "KEY": 15, "PACKET": 17, "RDS": 21, "TIPC": 30, "ALG": 38, "VSOCK": 40, "XDP": 44}
NUMBERS = {
    "x86_64": {"clone": 56, "unshare": 272, "socket": 41},
    "aarch64": {"clone": 220, "unshare": 97, "socket": 198},
}
ORDINARY = {
    "x86_64": [0, 1, 2, 9, 22, 57, 59, 202, 231, 257, 288, 318, 439],
    "aarch64": [56, 63, 64, 98, 221, 222, 242],
}


def refused_calls(machine: str = os.uname().machine) -> dict[str, int]:
    """Return the numbers of the calls that are refused whatever their arguments."""
    place, _ = system_calls._ARCHITECTURES[machine]
    rows = {**system_calls._REFUSED, **system_calls._MISSING, "fallocate": system_calls._FALLOCATE}
    return {name: number for name, row in rows.items() if (number := row[place]) is not None}


def decide(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """Run the filter as the kernel does, and return the error that a call is answered with, 0 for none."""
    given = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<iIQ6Q", number, architecture or ARCHITECTURES[machine], 0, *given)
    code = [
        struct.unpack_from("=HBBI", seccomp_filter(machine), at) for at in range(0, len(seccomp_filter(machine)), 8)
    ]
    at, loaded = 0, 0
    while True:
        kind, if_true, if_false, value = code[at]
        at += 1
        match kind:
            case 0x20:
                (loaded,) = struct.unpack_from("<I", data, value)
            case 0x15 | 0x35 | 0x45:
                holds = {0x15: loaded == value, 0x35: loaded >= value, 0x45: loaded & value != 0}[kind]
                at += if_true if holds else if_false
            case 0x06:
                assert value == ALLOW or value & 0x7FFF0000 == ERRNO
                return 0 if value == ALLOW else value & 0xFFFF
            case _:
                raise AssertionError(kind)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_x23_the_filter_refuses_what_the_table_says_and_no_more(machine: str) -> None:
    refused, numbers = refused_calls(machine), NUMBERS[machine]
    assert len(set(refused.values())) == len(refused) > 60
    by_number = {number: decide(machine, number, 1) for number in range(600)}
    newer = set(range(463, 600))
    assert {number for number, error in by_number.items() if error} == {*refused.values(), *newer}
    assert {by_number[number] for number in newer} == {errno.ENOSYS}
    assert all(by_number[number] == 0 for number in ORDINARY[machine])
    assert by_number[refused["clone3"]] == errno.ENOSYS  # or no thread starts
    for flag in NEW_NAMESPACES.values():
        assert decide(machine, numbers["clone"], flag | 17) == decide(machine, numbers["unshare"], flag) == errno.EPERM
    assert decide(machine, numbers["unshare"], NEW_TIME) == errno.EPERM
    assert decide(machine, numbers["clone"], 0x3D0F00) == decide(machine, numbers["clone"], 17) == 0  # thread, fork
    assert all(decide(machine, numbers["socket"], family, 3, 0) == errno.EPERM for family in REFUSED_FAMILIES.values())
    assert all(decide(machine, numbers["socket"], family, 1, 0) == 0 for family in (1, 2, 10, 16))
    assert decide(machine, numbers["socket"], 16, 3, 9) == errno.EPERM  # routing only, and not the audit's


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_x23_calls_of_another_architecture_are_refused(machine: str) -> None:
    assert decide(machine, 1, architecture=0x40000003) == errno.ENOSYS
    assert decide(machine, 0x40000001) == errno.ENOSYS  # x32's, of the same architecture


def test_a_machine_whose_calls_are_not_known_has_no_filter() -> None:
    assert seccomp_filter("riscv64") == b""


PROBE = """
import ctypes, json, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def ask(number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    return result, ctypes.get_errno()
parent = os.getpid()
seen = {}
for name, number, *arguments in json.loads(sys.argv[1]):
    seen[name] = ask(number, *arguments)
    if os.getpid() != parent:
        os._exit(0)
print(json.dumps(seen))
"""


async def run(sandboxes: LocalSandboxes, program: str, *args: str) -> Any:
    async with sandboxes.open() as sandbox:
        await sandbox.write("main.py", program.encode())
        result: ExecResult = await sandbox.exec(["python3", "-I", "-S", "main.py", *args], limits=LIMITS)
    assert result.exit_code == 0, (result.outcome, result.stderr[-2000:])
    return json.loads(result.stdout)


async def test_x23_every_refused_call_is_refused_at_every_level(at_level: LocalSandboxes) -> None:
    machine = os.uname().machine
    if not seccomp_filter():
        pytest.skip(f"there is no filter for {machine}")
    numbers = NUMBERS[machine]
    calls: list[list[Any]] = [[name, number] for name, number in refused_calls().items()]
    calls += [[f"unshare {name}", numbers["unshare"], flag] for name, flag in NEW_NAMESPACES.items()]
    calls += [[f"clone {name}", numbers["clone"], flag | 17, 0, 0, 0, 0] for name, flag in NEW_NAMESPACES.items()]
    calls += [[f"socket {name}", numbers["socket"], family, 3, 0] for name, family in REFUSED_FAMILIES.items()]
    calls += [["socket netlink audit", numbers["socket"], 16, 3, 9], ["newer", 480]]
    seen = await run(at_level, PROBE, json.dumps(calls))
    expected = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP}
    assert len(seen) == len(calls)
    assert {name: found for name, found in seen.items() if found[0] != -1 or found[1] not in expected} == {}
    # Of these the kernel itself would say something else to anyone.
    assert seen["io_uring_setup"][1] == seen["clone3"][1] == seen["memfd_create"][1] == errno.ENOSYS
    assert seen["shmget"][1] == seen["kcmp"][1] == seen["socket VSOCK"][1] == errno.EPERM


ORDINARY_PROGRAM = """
import asyncio, concurrent.futures, ctypes, hashlib, json, multiprocessing, os, queue, socket, sqlite3, ssl, subprocess
import sys, tempfile, threading, time, random
if os.path.exists("/usr/lib/python3/dist-packages"):
    sys.path.append("/usr/lib/python3/dist-packages")
done = []
def work(n): return n * n
try:
    import numpy
except ImportError:
    numpy = None
if numpy is not None:
    assert numpy.linalg.norm(numpy.ones((50, 50)) @ numpy.ones((50, 50))) > 0
    done.append("numpy")
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    assert list(pool.map(work, range(9))) == [n * n for n in range(9)]
done.append("threads")
assert subprocess.run(["sh", "-c", "echo $((6 * 7)) | cat"], capture_output=True).stdout == b"42\\n"
done.append("subprocesses")
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(work, range(5)) == [0, 1, 4, 9, 16]
done.append("multiprocessing")
with sqlite3.connect("base.db") as base:
    base.execute("create table t (x)")
    base.executemany("insert into t values (?)", [(n,) for n in range(100)])
    assert base.execute("select sum(x) from t").fetchone() == (4950,)
done.append("sqlite")
async def main():
    shell = await asyncio.create_subprocess_exec("echo", "x", stdout=-1)
    return (await shell.communicate())[0]
assert asyncio.run(main()) == b"x\\n"
done.append("asyncio")
with tempfile.TemporaryFile() as file:
    os.posix_fallocate(file.fileno(), 0, 4096)
    assert os.fstat(file.fileno()).st_size == 4096
done.append("posix_fallocate")
left, right = socket.socketpair()
left.send(b"x"); assert right.recv(1) == b"x"
assert socket.socket().getsockname()
assert socket.if_nameindex()
done.append("sockets")
os.sched_getaffinity(0); os.getrandom(4); time.sleep(0.001)
assert os.nice(0) == os.nice(5)  # which is done for nobody, and said to be
print(json.dumps(done))
"""


async def test_x23_ordinary_programs_still_run_at_every_level(at_level: LocalSandboxes) -> None:
    done = await run(at_level, ORDINARY_PROGRAM)
    others = ["threads", "subprocesses", "multiprocessing", "sqlite", "asyncio", "posix_fallocate", "sockets"]
    assert [name for name in done if name != "numpy"] == others


async def test_x23_keys_of_this_processs_session_are_not_seen(at_level: LocalSandboxes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    name = f"rollfeed-canary-{id(at_level)}".encode()
    add_key, keyctl, session = refused_calls().get("add_key"), refused_calls().get("keyctl"), -3
    if add_key is None or (key := libc.syscall(add_key, b"user", name, b"sesame", 6, session)) < 0:
        pytest.skip("this kernel keeps no keys, or lets this process have none")
    try:
        assert name.decode() in await asyncio.to_thread(Path("/proc/keys").read_text)
        program = "import json, os; print(json.dumps(os.path.exists('/proc/keys') and open('/proc/keys').read()))"
        assert name.decode() not in str(await run(at_level, program))
    finally:
        libc.syscall(keyctl, 9, key, session)  # unlinks it
