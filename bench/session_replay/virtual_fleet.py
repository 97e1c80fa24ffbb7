"""Conversations replayed on servers of the time model, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollfeed.routing import ServerLoadView
from rollfeed.testing.fake_sglang import TimeModel, TimeModelSettings, VirtualClock
from rollfeed.testing.fake_sglang.wire import FakeJob

from .server_choices import ReplayPolicy
from .session_traces import SessionTrace


@dataclass(slots=True, kw_only=True, eq=False)
class _ReplayJob(FakeJob):
    """A job whose prompt need not be read."""

    token_ids: NDArray[np.int32]

    def prompt_ids(self) -> NDArray[np.int32]:
        return self.token_ids


class _VirtualServer:
    def __init__(self, address: str, model: TimeModel) -> None:
        self.address = address
        self.model = model
        self.num_requests = 0
        self.num_tokens = 0
        self.most_requests = 0
        self.num_sampled = 0

    def load(self) -> ServerLoadView:
        return ServerLoadView(self.address, self.num_requests, self.num_tokens)


def replay(
    sessions: Sequence[SessionTrace], policy: ReplayPolicy, settings: TimeModelSettings, num_servers: int
) -> dict[str, Any]:
    """Replay conversations until the last has ended, and return JSON values: times are seconds of the servers."""
    return _Replay(sessions, policy, settings, num_servers).run()


class _Replay:
    def __init__(
        self, sessions: Sequence[SessionTrace], policy: ReplayPolicy, settings: TimeModelSettings, num_servers: int
    ) -> None:
        self._clock = VirtualClock()
        self._policy = policy
        self._sessions = sessions
        names = [f"http://server-{index}:30000" for index in range(num_servers)]
        self._servers = {name: _VirtualServer(name, TimeModel(settings, self._clock)) for name in names}
        self._homes: dict[str, str] = {}
        self._num_moves = 0
        self._ends: list[float] = []
        self._seconds: list[float] = []
        """Of each request."""
        self._prompt_tokens = self._cached_tokens = self._retractions = 0

    def run(self) -> dict[str, Any]:
        for session in self._sessions:
            begin = partial(self._ask, session, 0, session.turns[0].told)
            self._clock.call_at(session.arrival, begin)
        self._clock.run_until_idle()
        servers = self._servers.values()
        sampled = [server.num_sampled for server in servers]
        return {
            "wall_seconds": max(self._ends),
            "hit_rate": self._cached_tokens / self._prompt_tokens,
            "mean_session_end_seconds": float(np.mean(self._ends)),
            "request_seconds": {f"p{q}": float(np.percentile(self._seconds, q)) for q in (50, 99)},
            "requests": len(self._seconds),
            "moves": self._num_moves,
            "retractions": self._retractions,
            "busiest_over_mean": max(sampled) / float(np.mean(sampled)),
        }

    def _ask(self, session: SessionTrace, turn: int, token_ids: NDArray[np.int32]) -> None:
        loads = [server.load() for server in self._servers.values()]
        address = self._policy.choose(loads, token_ids, session=session.name, group=session.group)
        self._num_moves += self._homes.setdefault(session.name, address) != address
        self._homes[session.name] = address
        server = self._servers[address]
        server.num_requests += 1
        server.num_tokens += len(token_ids)
        job = _ReplayJob(
            rid=f"{session.name} {turn}",
            prompt=b"",
            prompt_tokens=len(token_ids),
            max_new_tokens=session.turns[turn].num_sampled,
            sample_key=session.name,
            ignore_eos=True,
            return_logprob=False,
            scores_from=None,
            on_end=lambda _: None,
            token_ids=token_ids,
        )
        job.on_end = partial(self._ended, session, turn, server, token_ids, self._clock.now())
        server.model.submit(job)

    def _ended(
        self,
        session: SessionTrace,
        turn: int,
        server: _VirtualServer,
        token_ids: NDArray[np.int32],
        began: float,
        job: FakeJob,
    ) -> None:
        server.num_requests -= 1
        server.num_tokens -= len(token_ids)
        server.num_sampled += job.output.num_tokens
        self._seconds.append(self._clock.now() - began)
        self._prompt_tokens += len(token_ids)
        self._cached_tokens += job.cached_tokens
        self._retractions += job.num_retractions
        made = msgspec.json.decode(b"[" + b"".join(job.output.ids) + b"]", type=list[int])
        whole = np.concatenate([token_ids, np.array(made, np.int32)])
        self._policy.ended(server.address, whole)
        if turn + 1 == len(session.turns):
            self._ends.append(self._clock.now())
            return
        then = partial(self._ask, session, turn + 1, np.concatenate([whole, session.turns[turn + 1].told]))
        self._clock.call_at(self._clock.now() + session.turns[turn].wait_seconds, then)
