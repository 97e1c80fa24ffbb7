from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollfeed.errors import ConfigError, WorkerCallError, WorkerDiedError, WorkerTimeoutError
from rollfeed.workers import WorkerPool

MiB = 1024**2


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def wait_for(path: Path) -> str:
    wait_until(lambda: path.exists() and bool(path.read_text()))
    return path.read_text()


async def until_written(path: Path) -> str:
    return await asyncio.to_thread(wait_for, path)


async def test_functions_log_into_the_log_of_the_run_and_print_as_without_it(tmp_path: Path) -> None:
    async with WorkerPool(num_workers=1) as pool:
        pool.output = tmp_path / "printed"
        await pool.call("worker_tasks.log_and_print", ["seven"], deadline_seconds=60)
    (line,) = (tmp_path / "run.log").read_text().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\S+ WARNING mine \(worker \d+\): seven is odd", line)
    assert pool.output.read_text() == "seven is odd\nseven\n"


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / MiB


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        -0.5,
        "text",
        "\ud800 alone",
        "\x00\n",
        10**60,
        [1, [2, {"a": None}]],
        {"k": [1.5]},
        "x" * 3_000_000,
    ],
)
async def test_values_cross_the_process_boundary_unchanged(value: Any) -> None:
    async with WorkerPool(num_workers=1) as pool:
        assert await pool.call("worker_tasks.echo", [value], deadline_seconds=60) == value


async def test_functions_are_named_with_dots_or_a_colon() -> None:
    async with WorkerPool(num_workers=1) as pool:
        assert await pool.call("worker_tasks:echo", [1], deadline_seconds=60) == 1
        assert await pool.call("os.path.basename", ["a/b"], deadline_seconds=60) == "b"


async def test_what_a_function_prints_does_not_disturb_its_result() -> None:
    async with WorkerPool(num_workers=1) as pool:
        assert await pool.call("worker_tasks.noisy", ["quiet"], deadline_seconds=60) == "quiet"
        assert await pool.call("worker_tasks.read_stdin", [], deadline_seconds=60) == ""


@pytest.mark.parametrize("unbuffered", ["", "1"])
async def test_lines_that_workers_print_at_once_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unbuffered: str
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    async with WorkerPool(num_workers=2) as pool:
        pool.output = tmp_path / "printed"
        names = [(str(tmp_path), "a", "b"), (str(tmp_path), "b", "a")]
        await asyncio.gather(*(pool.call("worker_tasks.talk", each, deadline_seconds=60) for each in names))
    text = pool.output.read_text()
    assert text.count("no end") == 2
    assert sorted(text.replace("no end", "").splitlines()) == ["I am a", "I am b"]


async def test_a_pool_that_ends_leaves_the_file_of_what_is_printed_to_others(tmp_path: Path) -> None:
    async with WorkerPool(num_workers=1) as pool:
        pool.output = tmp_path / "printed"
        await pool.call("worker_tasks.echo", [1], deadline_seconds=60)
        async with WorkerPool(num_workers=1) as other:
            other.output = pool.output
            await other.call("worker_tasks.echo", [1], deadline_seconds=60)
        await pool.call("builtins.print", ["later"], deadline_seconds=60)
    assert pool.output.read_text() == "later\n"


@pytest.mark.parametrize(
    ("function", "args", "said"),
    [
        ("worker_tasks.missing", [], "AttributeError: .*missing"),
        ("no_such_module.function", [], "ModuleNotFoundError: .*no_such_module"),
        ("__main__.function", [], "ImportError: .*__main__"),
        ("function", [], "ImportError: .*package.module.function"),
        ("worker_tasks.NOT_A_FUNCTION", [], "TypeError: .* is a int"),
        ("worker_tasks.coroutine", [], "TypeError: async functions"),
        ("worker_tasks.echo", [], "TypeError: .*argument"),
        ("worker_tasks.stop_itself", [], "SystemExit: 3"),
        ("builtins.set", [[1]], "TypeError: .*set is not JSON"),
        ("worker_tasks.echo", [{1, 2}], "the arguments are not JSON"),
    ],
)
async def test_a_failing_call_says_why_and_costs_no_worker(function: str, args: list[Any], said: str) -> None:
    async with WorkerPool(num_workers=1) as pool:
        before = await pool.call("worker_tasks.pid", [], deadline_seconds=60)
        with pytest.raises(WorkerCallError, match=said):
            await pool.call(function, args, deadline_seconds=60)
        assert await pool.call("worker_tasks.pid", [], deadline_seconds=60) == before
        assert pool.counts.raised == 1


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("os.abort", "SIGABRT"),
        ("worker_tasks.end_at_once", "exit code 3"),
        ("worker_tasks.close_everything", "exit code|SIGKILL"),  # where it takes its time to end
    ],
)
async def test_a_worker_that_dies_is_one_error_and_is_replaced(function: str, said: str) -> None:
    async with WorkerPool(num_workers=1) as pool:
        with pytest.raises(WorkerDiedError, match=said):
            await pool.call(function, [], deadline_seconds=60)
        assert await pool.call("worker_tasks.echo", [1], deadline_seconds=60) == 1
        assert pool.counts.died == 1


async def test_a_worker_killed_by_another_process_is_one_error(tmp_path: Path) -> None:
    async with WorkerPool(num_workers=2) as pool:
        path = tmp_path / "pid"
        call = asyncio.create_task(pool.call("worker_tasks.write_then_hang", [str(path)], deadline_seconds=60))
        os.kill(int(await until_written(path)), signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="SIGKILL"):
            await call
        assert await pool.call("worker_tasks.echo", [1], deadline_seconds=60) == 1


async def test_a_memory_bomb_is_an_error_of_its_call_only() -> None:
    async with WorkerPool(num_workers=1, memory_limit_bytes=512 * MiB) as pool:
        before = await pool.call("worker_tasks.pid", [], deadline_seconds=60)
        with pytest.raises(WorkerCallError, match="MemoryError"):
            await pool.call("worker_tasks.bomb", [], deadline_seconds=60)
        assert await pool.call("worker_tasks.pid", [], deadline_seconds=60) != before


async def test_a_timed_out_call_takes_the_processes_of_its_worker_with_it(gone: Callable[[int], bool]) -> None:
    async with WorkerPool(num_workers=1) as pool:
        child = await pool.call("worker_tasks.leave_child", [], deadline_seconds=60)
        with pytest.raises(WorkerTimeoutError, match=r"within 0.1 s"):
            await pool.call("time.sleep", [3600], deadline_seconds=0.1)
        assert gone(child)
        assert pool.counts.timeouts == 1


async def test_a_worker_that_dies_takes_its_processes_with_it(tmp_path: Path, gone: Callable[[int], bool]) -> None:
    path = tmp_path / "pid"
    async with WorkerPool(num_workers=1) as pool:
        with pytest.raises(WorkerDiedError):
            await pool.call("worker_tasks.die_and_leave_child", [str(path)], deadline_seconds=60)
        assert gone(int(path.read_text()))


async def test_a_cancelled_call_leaves_a_working_pool(tmp_path: Path, gone: Callable[[int], bool]) -> None:
    path = tmp_path / "pid"
    async with WorkerPool(num_workers=1) as pool:
        running = asyncio.create_task(pool.call("worker_tasks.write_then_hang", [str(path)], deadline_seconds=60))
        waiting = asyncio.create_task(pool.call("worker_tasks.echo", [1], deadline_seconds=60))
        later = asyncio.create_task(pool.call("worker_tasks.echo", [2], deadline_seconds=60))
        pid = int(await until_written(path))
        waiting.cancel()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert gone(pid)
        assert await later == 2


async def test_calls_get_their_turns_in_the_order_in_which_they_came() -> None:
    ended: list[int] = []

    async def call(number: int) -> None:
        ended.append(await pool.call("worker_tasks.echo", [number], deadline_seconds=60))

    async with WorkerPool(num_workers=1, max_waiting=2) as pool:
        await asyncio.gather(*(call(number) for number in range(50)))
    assert ended == list(range(50))


async def test_an_equal_call_is_answered_from_the_cache_when_that_is_asked_for() -> None:
    async with WorkerPool(num_workers=1, recycle_calls=1) as pool:
        first = await pool.call("worker_tasks.pid", [], deadline_seconds=60, cached=True)
        assert await pool.call("worker_tasks.pid", [], deadline_seconds=60, cached=True) == first
        assert await pool.call("worker_tasks.pid", [], deadline_seconds=60) != first
        assert pool.counts.cached == 1


async def test_equal_calls_that_wait_are_answered_by_the_first() -> None:
    async with WorkerPool(num_workers=1) as pool:
        calls = (pool.call("worker_tasks.echo", [[1]], deadline_seconds=60, cached=True) for _ in range(16))
        results = await asyncio.gather(*calls)
        assert results == [[1]] * 16
        assert len({id(result) for result in results}) == 16
        assert pool.counts.cached == 15


async def test_workers_are_recycled_by_calls_and_by_memory() -> None:
    async with WorkerPool(num_workers=1, recycle_calls=3) as pool:
        pids = [await pool.call("worker_tasks.pid", [], deadline_seconds=60) for _ in range(8)]
        assert len(set(pids)) > 1
        assert pool.counts.recycled > 1
    async with WorkerPool(num_workers=1, recycle_bytes=256 * MiB) as pool:
        first = await pool.call("worker_tasks.hold", [MiB], deadline_seconds=60)
        assert await pool.call("worker_tasks.hold", [300 * MiB], deadline_seconds=60) == first
        assert await pool.call("worker_tasks.pid", [], deadline_seconds=60) != first
        assert pool.counts.recycled == 1


async def test_workers_are_limited_in_memory_and_processor_time() -> None:
    async with WorkerPool(num_workers=1, memory_limit_bytes=512 * MiB) as pool:
        memory = await pool.call("resource.getrlimit", [resource.RLIMIT_AS], deadline_seconds=60)
        assert memory == [512 * MiB, 512 * MiB]
        for deadline_seconds in (30, 300):
            soft, _ = await pool.call("resource.getrlimit", [resource.RLIMIT_CPU], deadline_seconds=deadline_seconds)
            assert deadline_seconds < soft < deadline_seconds + 60


async def test_warm_up_modules_are_there_before_the_first_call() -> None:
    async with WorkerPool(num_workers=1, warm_up=["fractions"]) as pool:
        assert "fractions" in await pool.call("worker_tasks.loaded_modules", [], deadline_seconds=60)


async def test_a_warm_up_that_fails_is_said_at_the_start(processes: Callable[[], set[int]]) -> None:
    before = processes()
    with pytest.raises(ConfigError, match="no_such_module"):
        async with WorkerPool(num_workers=2, warm_up=["no_such_module"]) as pool:
            await pool.start()
    assert processes() <= before


async def test_a_closed_pool_leaves_no_process_and_refuses_calls(
    tmp_path: Path, processes: Callable[[], set[int]]
) -> None:
    before = processes()
    path = tmp_path / "pid"
    async with WorkerPool(num_workers=2) as pool:
        running = asyncio.create_task(pool.call("worker_tasks.write_then_hang", [str(path)], deadline_seconds=60))
        await until_written(path)
    with pytest.raises(WorkerDiedError):
        await running
    assert processes() <= before
    with pytest.raises(WorkerDiedError, match="closed"):
        await pool.call("worker_tasks.echo", [1], deadline_seconds=60)


async def test_calls_that_wait_for_a_starting_worker_end_when_the_pool_closes() -> None:
    async with WorkerPool(num_workers=1) as pool:
        with pytest.raises(WorkerDiedError):
            await pool.call("worker_tasks.end_at_once", [], deadline_seconds=60)
        waiting = asyncio.create_task(pool.call("worker_tasks.echo", [1], deadline_seconds=60))
        await asyncio.sleep(0)
    with pytest.raises(WorkerDiedError, match="closed"):
        await waiting


def test_workers_end_when_the_parent_is_killed(tmp_path: Path, gone: Callable[[int], bool]) -> None:
    script = f"""
        import asyncio, sys
        sys.path[:0] = [{str(Path(__file__).parent)!r}]
        from rollfeed.workers import WorkerPool

        async def main():
            async with WorkerPool(num_workers=2) as pool:
                idle = await pool.call("worker_tasks.pid", [], deadline_seconds=60)
                print(idle, flush=True)
                await pool.call("worker_tasks.write_then_hang", [sys.argv[1]], deadline_seconds=60)

        asyncio.run(main())
    """
    path = tmp_path / "pid"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(path)], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        idle = int(parent.stdout.readline())
        busy = int(wait_for(path))
        parent.kill()
    assert gone(idle)
    assert gone(busy)


def test_the_users_script_is_not_run_by_workers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import asyncio
            from rollfeed.workers import WorkerPool

            print("once")

            async def main():
                async with WorkerPool(num_workers=2) as pool:
                    print(await pool.call("math.factorial", [5], deadline_seconds=60))

            asyncio.run(main())
        """)
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=True)
    assert ran.stdout.split() == ["once", "120"]
    assert ran.stderr == ""


async def rounds_of_calls(
    *, rounds: int, calls: int, processes: Callable[[], set[int]]
) -> list[tuple[int, int, float]]:
    """Return how many processes there are more, descriptors and resident MiB of this process after each round."""
    seen, before = [], processes()
    async with WorkerPool(num_workers=2, recycle_calls=calls // 4, cache_entries=100) as pool:
        for number in range(rounds):
            answers = [
                pool.call("worker_tasks.is_seven", [f"{number} {call}"], deadline_seconds=60, cached=True)
                for call in range(calls)
            ]
            assert len(await asyncio.gather(*answers)) == calls
            await asyncio.gather(*(slot.ready() for slot in pool._slots))  # one may be being replaced
            seen.append((len(processes() - before), len(os.listdir("/proc/self/fd")), resident_mib()))
    return seen


async def test_ten_thousand_calls_leave_processes_descriptors_and_memory_as_they_were(
    processes: Callable[[], set[int]],
) -> None:
    before, descriptors = processes(), len(os.listdir("/proc/self/fd"))
    seen = await rounds_of_calls(rounds=5, calls=2_000, processes=processes)
    assert [counts[0] for counts in seen] == [2] * 5
    assert seen[-1][1] <= seen[0][1]
    assert seen[-1][2] <= seen[1][2] * 1.05
    assert processes() <= before
    assert len(os.listdir("/proc/self/fd")) <= descriptors  # what earlier tests left open may be closed meanwhile


async def test_a_hanging_call_does_not_hold_the_event_loop(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    async with WorkerPool(num_workers=1) as pool:
        hanging = asyncio.create_task(pool.call("worker_tasks.write_then_hang", [str(path)], deadline_seconds=60))
        await until_written(path)
        for _ in range(5):
            await asyncio.sleep(0.01)
        assert not hanging.done()
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)


async def test_the_deadline_does_not_count_the_wait_for_a_turn(tmp_path: Path, pass_seconds) -> None:
    path, other = tmp_path / "pid", tmp_path / "other"
    async with WorkerPool(num_workers=1) as pool:
        names = [str(tmp_path), path.name, other.name]
        first = asyncio.create_task(pool.call("worker_tasks.talk", names, deadline_seconds=7200))
        await asyncio.to_thread(wait_until, path.exists)
        waiting = asyncio.create_task(pool.call("worker_tasks.echo", [1], deadline_seconds=60))
        await asyncio.sleep(0)  # it waits for its turn
        pass_seconds(3600)
        other.touch()
        await first
        assert await waiting == 1


async def test_text_has_the_same_hash_in_all_workers() -> None:
    found = []
    for settings in ({}, {}, {"hash_seed": 1}):
        async with WorkerPool(num_workers=1, **settings) as pool:
            found.append(await pool.call("builtins:hash", ["text"], deadline_seconds=60.0))
    assert found[0] == found[1] != found[2]
