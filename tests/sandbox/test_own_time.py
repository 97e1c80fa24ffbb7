"""What a program has taken itself decides, whatever its neighbours do."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollfeed.protocols import ExecLimits, ExecOutcome
from rollfeed.rewards.code.grader import CodeGrader
from rollfeed.sandbox import LocalSandboxes, start_sandboxes
from rollfeed.sandbox.cgroups import Cgroup, find_cgroups
from rollfeed.sandbox.own_time import OwnClock, family_cpu_seconds, wants_core
from rollfeed.sandbox.running import run
from rollfeed.sandbox.usage import status_words

ONE_SPINS = "while :; do :; done"
NO_GROUPS = "none in this test"


@contextmanager
def started(script: str) -> Iterator[int]:
    process = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.read(1)
    try:
        yield process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def until(holds: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < ends_at
        time.sleep(0.01)


def until_asleep(pid: int) -> None:
    """Return when a process has become ``sleep`` and does: while its pages are read, it waits in another state."""
    command, state = Path(f"/proc/{pid}/cmdline"), f"/proc/{pid}/stat"
    until(lambda: b"sleep" in command.read_bytes().split(b"\0")[0] and status_words(state)[0] == "S")


def test_x20_a_program_that_waits_for_a_core_takes_no_time() -> None:
    with started(f"printf x; exec >/dev/null; {ONE_SPINS}") as pid:
        until(lambda: wants_core(pid))
        used = [0.0, 0.0, 0.25, 9.0]
        clock = OwnClock(pid, now=100.0, looks_every=0.1, used=lambda: used.pop(0))
        clock.tick(150.0)  # 50 s in which it had no core
        assert (clock.seconds, clock.cpu_seconds) == (0.0, 0.0)
        clock.tick(151.0)
        assert (clock.seconds, clock.cpu_seconds) == (0.25, 0.25)
        clock.tick(152.0)  # many processes on many cores: not longer than the time that has passed
        assert (clock.seconds, clock.cpu_seconds) == (1.25, 9.0)


def test_x20_a_program_that_sleeps_takes_time_and_a_late_look_counts_little_of_it() -> None:
    with started("printf x; exec sleep 600 >/dev/null") as pid:
        until_asleep(pid)
        clock = OwnClock(pid, now=100.0, looks_every=0.1, used=lambda: 0.0)
        clock.tick(100.1)
        assert clock.seconds == pytest.approx(0.1)
        clock.tick(160.0)
        assert clock.seconds == pytest.approx(0.2)


def test_x20_threads_and_descendants_count(tmp_path: Path) -> None:
    spin = tmp_path / "spin.py"
    spin.write_text(
        "import threading\ndef spin():\n while True: pass\nthreading.Thread(target=spin).start()\nprint(flush=True)"
    )
    with started(f"{sys.executable} -S {spin} & wait") as pid:
        until(lambda: wants_core(pid))  # threads that hand the interpreter on are looked at one after the other
    with started(
        "sh -c 'i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done'; printf x; exec sleep 600 >/dev/null"
    ) as pid:
        until_asleep(pid)
        assert family_cpu_seconds(pid) > 0.01  # of the child that has ended
    assert family_cpu_seconds(pid) == 0.0


class StandingGroup(Cgroup):
    """A group whose program gets no core at all."""

    def cpu_seconds(self) -> float:
        return 0.0

    def was_out_of_memory(self) -> bool:
        return False


async def test_x20_a_program_without_its_share_is_not_told_from_a_slow_one() -> None:
    limits = ExecLimits(wall_seconds=1.0, patience=1.5, cpu_seconds=60.0)
    launched = "printf started >&{0}; while :; do :; done"
    result = await run(
        lambda status: ["bash", "-c", launched.format(status)],
        stdin=b"",
        limits=limits,
        group=StandingGroup((), is_v2=True),
    )
    assert (result.outcome, result.exit_code) == (ExecOutcome.STARVED, None)


SPINNING_CHILDREN = """
import os
for _ in range(4):
    if os.fork() == 0:
        count = 0
        while count < 2_000_000:
            count += 1
        os._exit(0)
    os.wait()
while True:
    pass
"""


@pytest.mark.parametrize("cgroups", [None, NO_GROUPS], ids=["groups", "no-groups"])
async def test_x20_time_of_children_that_have_ended_counts(tmp_path: Path, cgroups: str | None) -> None:
    isolation = (await start_sandboxes(scratch=tmp_path)).isolation
    sandboxes = LocalSandboxes(isolation=isolation, max_running=1, scratch=tmp_path, cgroups=cgroups)
    async with sandboxes.open() as sandbox:
        limits = ExecLimits(wall_seconds=60.0, cpu_seconds=0.3)
        result = await sandbox.exec(["python3", "-I", "-S", "-c", SPINNING_CHILDREN], limits=limits)
    assert result.outcome is ExecOutcome.TIMEOUT


async def test_x20_a_program_that_the_kernel_ends_for_its_time_before_the_next_look_is_too_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandboxes = await start_sandboxes(scratch=tmp_path)
    monkeypatch.setattr("rollfeed.sandbox.running._WATCH_SECONDS", 3_600.0)  # as on a machine that is too busy to look
    async with sandboxes.open() as sandbox:
        limits = ExecLimits(wall_seconds=60.0, cpu_seconds=0.3)
        result = await sandbox.exec(["python3", "-I", "-S", "-c", "while True: pass"], limits=limits)
    assert (result.outcome, result.exit_code) == (ExecOutcome.TIMEOUT, None)


async def test_x20_without_groups_a_program_has_one_core_and_cannot_take_another(tmp_path: Path) -> None:
    isolation = (await start_sandboxes(scratch=tmp_path)).isolation
    program = """
import os
print(len(os.sched_getaffinity(0)))
try:
    os.sched_setaffinity(0, range(os.cpu_count()))
except PermissionError:
    print("refused")
"""
    sandboxes = LocalSandboxes(isolation=isolation, max_running=2, scratch=tmp_path, cgroups=NO_GROUPS)
    async with sandboxes.open() as sandbox:
        result = await sandbox.exec(["python3", "-I", "-S", "-c", program], limits=ExecLimits(wall_seconds=60.0))
    assert result.stdout.split() == [b"1", b"refused"]


RIGHT = """
count = 0
for number in range(4_000_000):
    count += number & 1
print(count + int(input()))
"""
HOSTILE = """
import os
for _ in range(30):
    if os.fork() == 0:
        break
while True:
    pass
"""


async def test_x20_a_right_program_is_right_beside_spinning_neighbours(tmp_path: Path) -> None:
    sandboxes = await start_sandboxes(scratch=tmp_path, max_running=3)
    grader = CodeGrader(sandboxes=sandboxes, limits=ExecLimits(wall_seconds=3.0, patience=60.0))
    neighbours = CodeGrader(sandboxes=sandboxes, limits=ExecLimits(wall_seconds=0.5))
    label = {"inputs": ["1"], "outputs": ["2000001"]}

    async def grade(grader: CodeGrader, program: str) -> float | None:
        verdict = await grader(f"```python\n{program}\n```", label, {})
        assert verdict.reward is None or isinstance(verdict.reward, float)
        return verdict.reward

    async with asyncio.TaskGroup() as tasks:
        hostile = [tasks.create_task(grade(neighbours, HOSTILE)) for _ in range(2)]
        right = tasks.create_task(grade(grader, RIGHT))
    assert right.result() == 1.0
    assert all(task.result() in (0.0, None) for task in hostile)


def test_groups_are_found_or_the_reason_is_said(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text("0::/user/scope\n")
    (proc / "mountinfo").write_text("30 20 0:1 / / rw - ext4 /dev/x rw\n")
    assert find_cgroups(proc) == "no control groups are mounted"
    assert "cannot be made" in str(find_cgroups(tmp_path / "missing"))
    own = tmp_path / "groups" / "user" / "scope"
    own.mkdir(parents=True)
    other = tmp_path / "other"
    other.mkdir()
    (other / "cgroup").write_text("0::/user/scope\n")
    (other / "mountinfo").write_text(f"40 20 0:2 / {tmp_path}/groups rw shared:1 - cgroup2 cgroup2 rw\n")
    (own / "cgroup.controllers").write_text("hugetlb\n")
    (own / "cgroup.subtree_control").write_text("\n")
    assert "has no cpu and no memory" in str(find_cgroups(other))


def test_a_group_of_version_2_is_read_as_the_kernel_writes_it(tmp_path: Path) -> None:
    (tmp_path / "cpu.stat").write_text("usage_usec 1500000\nuser_usec 1\nsystem_usec 2\n")
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 7\noom 1\noom_kill 0\n")
    group = Cgroup((tmp_path,), is_v2=True)
    assert group.cpu_seconds() == 1.5
    assert not group.was_out_of_memory()
    (tmp_path / "memory.events").write_text("oom 1\noom_kill 2\n")
    assert group.was_out_of_memory()


def test_groups_that_a_killed_process_has_left_are_swept() -> None:
    found = find_cgroups()
    if isinstance(found, str):
        pytest.skip(found)
    ended = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, check=True).stdout.strip().decode()
    namespace = os.stat("/proc/self/ns/pid").st_ino
    left = found.parents[0] / f"rollfeed-{namespace}-{ended}-0"
    left.mkdir()
    kept = found.make(1 << 30)
    try:
        found.sweep()
        assert not left.exists()
        assert all(folder.exists() for folder in kept.folders)
    finally:
        kept.remove()
    assert not any(folder.exists() for folder in kept.folders)
