"""Processes of this host that train one model together, called alike: every call goes to all of them.

They are started by torchrun's launcher and have its environment. Invariant: a call ends with what rank 0 returned, with
what all of them raised alike, or with :class:`HostDiedError`, after which none of them is left.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import pickle
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from rollfeed.base.waiting import until_done
from rollfeed.cluster.hosting import Host, HostDiedError, returned
from rollfeed.cluster.rank_process import RankAnswer, log_of
from rollfeed.errors import RunFailedError

_GRACE_SECONDS = 5.0
"""For the other ranks to answer when one has failed; alone they wait for it."""
_DYING_SECONDS = 30.0
"""For a process whose connection has ended to be gone; on a busy machine nothing else tells that soon how it ended."""
_ENDING_SECONDS = 5.0
_LOOK_SECONDS = 0.2
_START_SECONDS = 300.0
"""For a process to have imported what it needs."""


class RankGroup(Host):
    """Ranks of a model; entered with ``async with``, and gone when that is left.

    Args:
        num_ranks: How many.
        factory: Import path of what makes the object of each.
        args: What that takes.
        timeout_seconds: The longest that one may take no request, or answer after the others.
    """

    def __init__(self, num_ranks: int, factory: str, *args: Any, timeout_seconds: float) -> None:
        self.name = f"{num_ranks} processes of the trainer"
        self._num_ranks = num_ranks
        self._object = (factory, *args)
        self._timeout_seconds = timeout_seconds
        self._turn = asyncio.Lock()
        self._connections: dict[int, Connection] = {}
        self._pids: dict[int, int] = {}
        self._processes: Any = None
        self._lost: str | None = None

    async def __aenter__(self) -> RankGroup:
        # Short, as the path of a socket has to be.
        self._folder = Path(tempfile.mkdtemp(prefix="rollfeed-ranks-"))
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(str(self._folder / "socket"))
            listener.listen(self._num_ranks)
            listener.settimeout(_LOOK_SECONDS)
            self._start()
            await asyncio.to_thread(self._meet, listener)
        except BaseException:
            await self.__aexit__()
            raise
        finally:
            listener.close()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        await asyncio.to_thread(self._end)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method in all ranks; one call after the other.

        Raises:
            HostDiedError: If one fails in another way than the others do, dies, or does not answer; all have been ended
                then.
            RollfeedError: What all of them raise.
        """
        async with self._turn:
            # Whoever is stopped waits: two calls at once would take each other's answers.
            return await until_done(asyncio.create_task(asyncio.to_thread(self._call, method, args)))

    def kill(self) -> None:
        """End all of them at once."""
        if self._processes is not None:
            self._processes.close(signal.SIGKILL, 10)

    def _start(self) -> None:
        """Start them from this thread: they end with it."""
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

        from rollfeed.base.update_group import listen

        self._store = listen("127.0.0.1", timeout_seconds=_START_SECONDS)
        common = {
            "WORLD_SIZE": str(self._num_ranks),
            "LOCAL_WORLD_SIZE": str(self._num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_RUN_ID": "trainer",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYTHONUNBUFFERED": "1",
        }
        # What it does to them is told in the error, once.
        logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
        words = ("-m", "rollfeed.cluster.rank_process", str(self._folder / "socket"), str(os.getpid()))
        ranks = range(self._num_ranks)
        with _own_signal_handlers():
            self._processes = start_processes(
                name="trainer",
                entrypoint=sys.executable,
                args={rank: words for rank in ranks},
                envs={rank: {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in ranks},
                logs_specs=DefaultLogsSpecs(log_dir=str(self._folder)),
            )
        self._pids = dict(self._processes.pids())

    def _meet(self, listener: socket.socket) -> None:
        end = time.monotonic() + _START_SECONDS
        while len(self._connections) < self._num_ranks:
            with suppress(TimeoutError, EOFError, ConnectionError):  # who ends at once is gone below
                accepted, _ = listener.accept()
                # What is written to a process that has been stopped would wait for ever.
                longest = struct.pack("ll", *divmod(int(self._timeout_seconds * 1e6), 1_000_000))
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, longest)
                connection = Connection(accepted.detach())
                rank: int = connection.recv()
                self._connections[rank] = connection
                connection.send(self._object)
            gone = [rank for rank in self._pids if self._exit_code(rank) is not None]
            if gone or time.monotonic() > end:
                self.kill()
                raise RunFailedError(self._said_of_dead(gone) if gone else f"{self.name} have not started in time")

    def _call(self, method: str, args: tuple[Any, ...]) -> Any:
        if self._lost is not None:
            raise HostDiedError(self._lost)
        # Once for all of them: a batch is large.
        request = pickle.dumps((method, args), pickle.HIGHEST_PROTOCOL)
        dead, stuck = list[int](), list[int]()
        for rank, connection in self._connections.items():
            try:
                connection.send_bytes(request)
            except BlockingIOError:
                stuck.append(rank)
            except OSError:
                dead.append(rank)
        answers = {} if stuck else self._answers(dead)
        errors = [answers[rank].outcome for rank in answers if answers[rank].outcome[0] is not None]
        for name, level, text in answers[0].records if 0 in answers else ():
            logging.getLogger(name).log(level, "%s", text)
        is_whole = len(answers) == self._num_ranks
        if is_whole and (not errors or errors == [errors[0]] * self._num_ranks):
            return returned(answers[0].outcome)
        self._lost = self._cause(dead, stuck, answers)
        self.kill()
        raise HostDiedError(self._lost)

    def _answers(self, dead: list[int]) -> dict[int, RankAnswer]:
        """Return what ranks answer, in that order, until all have, or the others have waited for long enough.

        Those whose connection ends are added to ``dead``.
        """
        answers: dict[int, RankAnswer] = {}
        left = {connection: rank for rank, connection in self._connections.items() if rank not in dead}
        end = math.inf
        while left:
            now = time.monotonic()
            if dead or any(each.outcome[0] is not None for each in answers.values()):
                end = min(end, now + _GRACE_SECONDS)
            elif answers:
                end = min(end, now + self._timeout_seconds + _GRACE_SECONDS)
            ready = wait(list(left), None if end == math.inf else max(0.0, end - now))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = left.pop(connection)
                try:
                    answers[rank] = connection.recv()
                except (EOFError, ConnectionError):
                    dead.append(rank)
        return answers

    def _cause(self, dead: list[int], stuck: list[int], answers: dict[int, RankAnswer]) -> str:
        """Say once what was first: a death, or else the first error; and who does not answer."""
        silent = stuck or [rank for rank in self._connections if rank not in answers and rank not in dead]
        said = f"no answer from rank {', '.join(map(str, silent))}" if silent else ""
        if dead:
            return self._said_of_dead(dead, waited_for=f"; {said}" if said else "")
        failed = {rank: answer.outcome[1] for rank, answer in answers.items() if answer.outcome[0] is not None}
        rank, text = next(iter(failed.items()), (0, ""))
        if not failed or (silent and "Timed out" in text):
            return f"{said} of {self._num_ranks} in train.process_timeout_seconds = {self._timeout_seconds:g}"
        return f"rank {rank} of {self._num_ranks}: {text}{f'; {said}' if said else ''}"

    def _said_of_dead(self, ranks: Iterable[int], *, waited_for: str = "") -> str:
        rank = next(iter(ranks))
        end = time.monotonic() + _DYING_SECONDS
        while (code := self._exit_code(rank)) is None and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS / 4)
        how = "has closed its connection" if code is None else f"has ended with code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            how, waited_for = f"{how}, as the kernel does where memory runs out", ""
        else:
            how += self._last_words(rank)
        return f"rank {rank} of {self._num_ranks} (process {self._pids[rank]}) {how}{waited_for}"

    def _last_words(self, rank: int) -> str:
        log = log_of(self._folder, rank)
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        # Exceptions of C++ say what they are before they say where.
        found = [line for line in lines if "what():" in line] or lines
        return f" ({found[-1][:300]})" if found else ""

    def _exit_code(self, rank: int) -> int | None:
        """Return how a process has ended, minus the number of its signal where one has killed it; None where it runs.

        Whoever waits for it still can.
        """
        with suppress(ChildProcessError):
            found = os.waitid(os.P_PID, self._pids[rank], os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if found is None:
                return None
            return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        return 0

    def _end(self) -> None:
        """Wait a little for processes that have nothing to do any more, and end the others."""
        end = time.monotonic() + _ENDING_SECONDS
        while any(self._exit_code(rank) is None for rank in self._pids) and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS / 4)
        self.kill()


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Take back the handlers that torchrun's launcher sets for a process that does nothing else."""
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]
    before: dict[signal.Signals, Callable[..., Any] | int | None] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
