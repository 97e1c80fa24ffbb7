"""A fake server apart from its routes: its engine and its weights, and the engine that answers from a list."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from rollfeed.base.sglang_wire import ABORTED, DEFAULT_VERSION, Usage
from rollfeed.testing.fake_sglang.clock import Clock, LoopClock, Timer
from rollfeed.testing.fake_sglang.faulty import FaultyServer
from rollfeed.testing.fake_sglang.settings import FakeMode, FakeSettings, ScriptedReply
from rollfeed.testing.fake_sglang.time_model import TimeModel
from rollfeed.testing.fake_sglang.tokens import Output, explicit_output, token_pool
from rollfeed.testing.fake_sglang.wire import FakeBackend, FakeJob

_STRIDE = 257
"""From where in the pool one response comes to where the next one does."""
_MOST_TOKENS = 1 << 40
_MOST_RUNNING = 4096
_DIED = 1
_POLL_SECONDS = 0.01


class ServerCore(FaultyServer):
    """Holds an engine.

    ``ends_process`` says whether dying ends the process instead of the server's sockets; the clock is by default the
    event loop's at the set speed.
    """

    def __init__(
        self, settings: FakeSettings, *, port: int = 0, ends_process: bool = False, clock: Clock | None = None
    ) -> None:
        super().__init__(host=settings.host, port=port, api_key=settings.api_key, faults=settings.faults)
        self.settings = settings
        self.clock = clock or LoopClock(speed=settings.speed)
        self.weight_version = self.previous_version = DEFAULT_VERSION
        self.kept_requests: deque[bytes] = deque(maxlen=0 if settings.mode is FakeMode.ZERO else settings.keep_requests)
        """Bodies of the latest calls of ``/generate``."""
        self.finished: Counter[str] = Counter()
        """Ended responses, by the type of their finish reason."""
        self.backend: FakeBackend = self._make_backend()
        self._behind: list[Callable[[], object]] | None = None
        """What begins the calls that wait behind an update, while there is one."""
        self._ends_process = ends_process

    async def stop(self) -> None:
        await super().stop()
        self.backend.abort(lambda _: True)

    def stats(self) -> dict[str, Any]:
        usage = self.backend.usage()
        return {
            **super().stats(),
            "finished": dict(self.finished),
            "num_connections": len(self.http.connections),
            "most_connections": self.http.most_connections,
            "weight_version": self.weight_version,
            "clock_seconds": self.clock.now(),
            **msgspec.to_builtins(usage),
        }

    def _make_backend(self) -> FakeBackend:
        if self.settings.mode is FakeMode.TIME_MODEL:
            return TimeModel(self.settings.time_model, self.clock)
        return ScriptedBackend(self.clock, self.settings.script, self.settings.vocab_size)

    def die(self) -> None:
        if self._ends_process:
            os._exit(_DIED)
        super().die()
        self.backend.abort(lambda _: True)

    async def restart(self) -> None:
        """Listen again after ``die``, as a new process on the same port does: idle, with the first weights."""
        self.weight_version = self.previous_version = DEFAULT_VERSION
        self.backend = self._make_backend()
        self._behind = None
        await self.http.start()

    def set_version(self, version: str | None, *, num_late: int = 0) -> None:
        """Serve another weight version from now on; None keeps the name.

        Of the tokens that requests have, ``num_late`` count to it already.
        """
        self.previous_version = self.weight_version
        if version is not None:
            self.weight_version = version
            for job, num_tokens in self.backend.progress():
                job.note_version(max(0, num_tokens - num_late), version)

    def when_idle(self, action: Callable[[], object]) -> None:
        """Do something once all that runs has ended; new calls wait behind it."""
        self._behind = [] if self._behind is None else self._behind

        def look() -> None:
            usage = self.backend.usage()
            if usage.num_running + usage.num_waiting > 0:
                self.later(_POLL_SECONDS, look)
                return
            action()
            behind, self._behind = self._behind or [], None
            for begin in behind:
                begin()

        look()

    def begin(self, call: Callable[[], object]) -> None:
        """Begin a call of ``/generate``, behind an update if there is one."""
        if self._behind is None:
            call()
        else:
            self._behind.append(call)


class ScriptedBackend:
    """Makes responses from a list, when it is told to, and after it responses of full length at once."""

    def __init__(self, clock: Clock, script: Iterable[ScriptedReply] = (), vocab_size: int | None = None) -> None:
        self._clock = clock
        self._script = deque(script)
        self._held: deque[FakeJob] = deque()
        self._running: dict[FakeJob, tuple[ScriptedReply, Timer]] = {}
        self._is_paused = False
        self._pool = token_pool(vocab_size)
        self._num_made = 0
        self._generated_tokens = 0

    def extend(self, script: Iterable[ScriptedReply]) -> None:
        """Add replies to the end of the list."""
        self._script.extend(script)

    def submit(self, job: FakeJob) -> None:
        if self._is_paused:
            self._held.append(job)
            return
        reply = self._take(job)
        if reply is None:
            # A prime number apart, so that responses differ.
            output = self._pool.output(self._num_made * _STRIDE, job.max_new_tokens)
            self._num_made += 1
            self._end(job, output, {"type": "length", "length": job.max_new_tokens})
        elif reply.delay_seconds > 0.0:
            timer = self._clock.call_at(self._clock.now() + reply.delay_seconds, lambda: self._wake(job))
            self._running[job] = (reply, timer)
        else:
            self._finish(job, reply)

    def abort(self, concerned: Callable[[FakeJob], bool]) -> int:
        held = [job for job in self._held if concerned(job)]
        running = [job for job in self._running if concerned(job)]
        self._held = deque(job for job in self._held if job not in held)
        for job in running:
            reply, timer = self._running.pop(job)
            timer.cancel()
            self._end(job, _output(reply, reply.num_tokens_when_aborted), ABORTED)
        for job in held:
            self._end(job, Output((), (), (), 0), ABORTED)
        return len(held) + len(running)

    def pause(self, mode: str) -> None:
        self._is_paused = True
        if mode == "abort":
            self.abort(lambda _: True)
        elif mode == "retract":
            for job in self._running:
                job.num_retractions += 1

    def resume(self) -> None:
        self._is_paused = False
        held, self._held = self._held, deque()
        for job in held:
            self.submit(job)

    def stall(self, seconds: float) -> None:
        pass

    def flush(self) -> None:
        pass

    def progress(self) -> Sequence[tuple[FakeJob, int]]:
        running = [(job, reply.num_tokens_when_aborted) for job, (reply, _) in self._running.items()]
        return [*running, *((job, 0) for job in self._held)]

    def usage(self) -> Usage:
        return Usage(
            num_running=len(self._running),
            num_waiting=len(self._held),
            num_used_tokens=sum(job.prompt_tokens for job in self._running),
            num_uncached_tokens=sum(job.prompt_tokens for job in self._held),
            max_total_tokens=_MOST_TOKENS,
            max_running=_MOST_RUNNING,
            tokens_per_second=0.0,
            generated_tokens=self._generated_tokens,
        )

    def _take(self, job: FakeJob) -> ScriptedReply | None:
        for index, reply in enumerate(self._script):
            if job.rid.startswith(reply.rid_prefix):
                del self._script[index]
                return reply
        return None

    def _wake(self, job: FakeJob) -> None:
        reply, _ = self._running.pop(job)
        self._finish(job, reply)

    def _finish(self, job: FakeJob, reply: ScriptedReply) -> None:
        if reply.status != 200:
            job.status, job.error = reply.status, reply.text
            self._end(job, Output((), (), (), 0), None)
            return
        self._end(job, _output(reply, len(reply.output_ids)), _finish_reason(reply))

    def _end(self, job: FakeJob, output: Output, finish_reason: dict[str, Any] | None) -> None:
        self._generated_tokens += output.num_tokens
        job.end(output, finish_reason)


def _output(reply: ScriptedReply, num_tokens: int) -> Output:
    token_ids = reply.output_ids[:num_tokens]
    logprobs = reply.logprobs if reply.logprobs is not None else token_pool().logprobs[:num_tokens].tolist()
    text = reply.text if num_tokens == len(reply.output_ids) else ""
    return explicit_output(token_ids, logprobs[:num_tokens], text)


def _finish_reason(reply: ScriptedReply) -> dict[str, Any] | None:
    if not isinstance(reply.finish_reason, str):
        return reply.finish_reason
    if reply.finish_reason == "length":
        return {"type": "length", "length": len(reply.output_ids)}
    if reply.finish_reason == "abort":
        return ABORTED
    return {"type": "stop", "matched": reply.output_ids[-1] if reply.output_ids else None}
