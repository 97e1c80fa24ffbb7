"""Responses from a list, and after it responses of full length at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rollfeed.testing.fake_sglang.clock import Clock, Timer
from rollfeed.testing.fake_sglang.settings import ScriptedReply
from rollfeed.testing.fake_sglang.tokens import Output, explicit_output, token_pool
from rollfeed.testing.fake_sglang.wire import ABORTED, Job, Usage

_STRIDE = 257
"""From where in the pool one response comes to where the next one does."""
_MOST_TOKENS = 1 << 40
_MOST_RUNNING = 4096


class ScriptedBackend:
    """Makes what it is told to, when it is told to."""

    def __init__(self, clock: Clock, script: Iterable[ScriptedReply] = ()) -> None:
        self._clock = clock
        self._script = deque(script)
        self._held: deque[Job] = deque()
        self._running: dict[Job, tuple[ScriptedReply, Timer]] = {}
        self._is_paused = False
        self._pool = token_pool()
        self._num_made = 0
        self._generated_tokens = 0

    def extend(self, script: Iterable[ScriptedReply]) -> None:
        """Add replies to the end of the list."""
        self._script.extend(script)

    def submit(self, job: Job) -> None:
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

    def abort(self, concerned: Callable[[Job], bool]) -> int:
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

    def progress(self) -> Sequence[tuple[Job, int]]:
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

    def _take(self, job: Job) -> ScriptedReply | None:
        for index, reply in enumerate(self._script):
            if job.rid.startswith(reply.rid_prefix):
                del self._script[index]
                return reply
        return None

    def _wake(self, job: Job) -> None:
        reply, _ = self._running.pop(job)
        self._finish(job, reply)

    def _finish(self, job: Job, reply: ScriptedReply) -> None:
        if reply.status != 200:
            job.status, job.error = reply.status, reply.text
            self._end(job, Output((), (), (), 0), None)
            return
        self._end(job, _output(reply, len(reply.output_ids)), _finish_reason(reply))

    def _end(self, job: Job, output: Output, finish_reason: dict[str, Any] | None) -> None:
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
