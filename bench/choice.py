"""Measure what the choice of a server costs a request, and the memory of what servers are believed to have.

Run it with::

    python bench/choice.py --out bench/choice.json

Beside it in the same run: the server by a hash of the prompt's first 512 tokens, unless it has 8 requests more than the
least busy one. Times are processor time, so that a busy machine disturbs them little.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from rollfeed.benchmarks.machine import machine
from rollfeed.routing import Chooser, HasLoad, RoutingSettings

NUM_SESSIONS = 3_000
BEGINNING, SAMPLED, TOLD, LONGEST = 400, 200, 150, 4_000
"""Tokens: of all conversations together, of a turn, between two, of a conversation before it begins again."""


class BusyServer:
    """A server with a number of requests under way."""

    num_waiting = 0
    kv_use = None

    def __init__(self, address: str) -> None:
        self.address = address
        self.num_requests = 0


class Conversations:
    """Turns of conversations that begin alike, at servers with ten requests each."""

    def __init__(self, num_servers: int, *, max_tokens: int, has_sessions: bool, seed: int = 0) -> None:
        self.servers = tuple(BusyServer(f"http://10.0.{n // 256}.{n % 256}:30000") for n in range(num_servers))
        self.chooser = Chooser(RoutingSettings(max_tokens=max_tokens))
        self.reasons: Counter[str] = Counter()
        self._by_address = {server.address: server for server in self.servers}
        self._under_way: deque[BusyServer] = deque()
        self._random = np.random.default_rng(seed)
        self._beginning = self._made(BEGINNING)
        self._texts: dict[int, NDArray[np.int32]] = {}
        self._has_sessions = has_sessions

    def _made(self, count: int) -> NDArray[np.int32]:
        return self._random.integers(0, 150_000, count, dtype=np.int32)

    def turn(self) -> tuple[float, float, float, int]:
        """Return the seconds of the choice, of its end, and of the hash, and the tokens of the prompt."""
        number = int(self._random.integers(NUM_SESSIONS))
        text = self._texts.get(number)
        if text is None or len(text) > LONGEST:
            text = np.concatenate([self._beginning, self._made(int(self._random.integers(50, 600)))])
        session = f"session-{number}" if self._has_sessions else None
        began = time.process_time()
        hashed(self.servers, text)
        hash_ended = time.process_time()
        choice = self.chooser.choose(self.servers, text, policy_version=1, session=session)
        chosen = time.process_time()
        answered = np.concatenate([text, self._made(SAMPLED)])
        before_end = time.process_time()
        self.chooser.ended(choice.address, answered, policy_version=1)
        ended = time.process_time()
        self._texts[number] = np.concatenate([answered, self._made(TOLD)])
        self.reasons[choice.reason] += 1
        server = self._by_address[choice.address]
        server.num_requests += 1
        self._under_way.append(server)
        if len(self._under_way) > 10 * len(self.servers):
            self._under_way.popleft().num_requests -= 1
        return chosen - hash_ended, ended - before_end, hash_ended - began, len(text)

    def fill(self, num_tokens: int) -> None:
        """Take turns until so many tokens are known."""
        self.turn()
        while self.chooser.num_tokens < num_tokens:
            self.turn()


def hashed(servers: Sequence[HasLoad], prompt_ids: NDArray[np.int32]) -> HasLoad:
    """Return the server that a prompt's beginning falls to, or the least busy one."""
    least = min(servers, key=lambda server: server.num_requests)
    key = crc32(prompt_ids[:512].tobytes())
    home = max(servers, key=lambda server: crc32(server.address.encode(), key))
    return home if home.num_requests <= least.num_requests + 8 else least


def measure(num_servers: int, *, num_tokens: int, has_sessions: bool, num_turns: int) -> dict[str, Any]:
    """Return the figures of a full tree, as JSON values."""
    played = Conversations(num_servers, max_tokens=num_tokens, has_sessions=has_sessions)
    played.fill(int(0.97 * num_tokens))
    played.reasons.clear()
    rows = np.array([played.turn() for _ in range(num_turns)])
    choose, ended, by_hash, tokens = rows.T
    return {
        "servers": num_servers,
        "has_sessions": has_sessions,
        "mean_prompt_tokens": float(tokens.mean()),
        "choose_us": {f"p{q}": float(np.percentile(choose, q) * 1e6) for q in (50, 99)},
        "ended_us": {f"p{q}": float(np.percentile(ended, q) * 1e6) for q in (50, 99)},
        "hash_us": {f"p{q}": float(np.percentile(by_hash, q) * 1e6) for q in (50, 99)},
        "cost_over_hash": float((np.median(choose) + np.median(ended)) / np.median(by_hash)),
        "reasons": dict(played.reasons),
    }


def bytes_a_token(num_tokens: int) -> float:
    """Return the memory of the tree a token, the tokens themselves included."""
    played = Conversations(64, max_tokens=num_tokens, has_sessions=False)
    tracemalloc.start()
    chooser, played.chooser = played.chooser, Chooser(RoutingSettings(max_tokens=num_tokens))
    del chooser
    played.fill(int(0.97 * num_tokens))
    before = tracemalloc.get_traced_memory()[0]
    num_known = played.chooser.num_tokens
    played.chooser.forget_versions_before(2)
    freed = before - tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return freed / num_known


def main() -> None:
    """Measure and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, nargs="+", default=[8, 64, 1000])
    parser.add_argument("--tokens", type=int, default=5_000_000, help="that the tree has")
    parser.add_argument("--turns", type=int, default=6_000)
    parser.add_argument("--out", type=Path, help="a file for the figures")
    arguments = parser.parse_args()
    tokens, turns = arguments.tokens, arguments.turns
    cells = [
        # Of few servers each is believed to keep less than the tree has room for.
        measure(count, num_tokens=min(tokens, 400_000 * count), has_sessions=has_sessions, num_turns=turns)
        for count in arguments.servers
        for has_sessions in (False, True)
    ]
    figures = {
        "cells": cells,
        "bytes_a_token": bytes_a_token(tokens),
        "tokens": tokens,
        "command": "python bench/choice.py --out bench/choice.json",
        "seed": 0,
        "machine": machine(),
    }
    told = json.dumps(figures, indent=1)
    print(told)
    if arguments.out is not None:
        arguments.out.write_text(told + "\n")


if __name__ == "__main__":
    main()
