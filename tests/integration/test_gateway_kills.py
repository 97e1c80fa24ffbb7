"""A gateway and its agents, killed in the middle of sessions: each turn that an agent was told is trained, and once.

The gateway comes back on its folder and port, an agent with its session, in which it says again what it said before,
with the same keys.
"""

import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from rollfeed import app
from rollfeed.base.true_runs import runs_of
from rollfeed.benchmarks.gateway.fake_policy import read_sampled
from rollfeed.benchmarks.gateway.gateway_processes import ENGINE, GatewayProcess, serving, write_model
from rollfeed.benchmarks.gateway.sampled_once import compare
from rollfeed.benchmarks.gateway.talks import Api
from rollfeed.benchmarks.machine import command_environment

AGENT = Path(__file__).with_name("killed_gateway_agent.py")
NUM_AGENTS = 3
"""At once."""
NUM_TURNS = 6
LONGEST_DELAY = 0.1
"""Seconds from the turn after which something is killed to the kill."""
QUIET_SECONDS = 120.0
NUMBER = re.compile(r'number\\*": ?(\d+)')
"""In a turn, by which it is told from all others."""


@dataclass(slots=True)
class Agent:
    """A session, and the process that plays its agent."""

    session_id: str
    number: int
    words: list[str]
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, str(AGENT), *self.words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env=command_environment())

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()

    @property
    def has_ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None


class Monkey:
    """Keeps agents at work, and kills."""

    def __init__(self, gateway: GatewayProcess, random: Random) -> None:
        self.gateway = gateway
        self.told: list[str] = []
        """Numbers of the turns that agents were told in the end."""
        self.num_sessions = 0
        self._random = random
        self._agents: list[Agent] = []

    @contextmanager
    def working(self) -> Iterator[None]:
        self._agents = [self._new_agent() for _ in range(NUM_AGENTS)]
        try:
            yield
            while self._agents:
                self._wait_until(lambda: any(agent.has_ended for agent in self._agents))
                for agent in [agent for agent in self._agents if agent.has_ended]:
                    self._agents.remove(agent)
                    self._finish(agent)
        finally:
            for agent in self._agents:
                agent.kill()

    def kill_gateway(self, *, spoil: Callable[[Path], None] | None = None) -> None:
        self._wait_for_a_turn()
        self.gateway.kill()
        if spoil is not None:
            spoil(self.gateway.folder)
        self.gateway.start()

    def kill_agent(self) -> None:
        agent = self._agents[self._wait_for_a_turn()]
        agent.kill()
        agent.start()

    def _wait_for_a_turn(self) -> int:
        """Wait until the session of an agent has come somewhere, and return the agent's place."""
        place, num_turns = self._random.randrange(NUM_AGENTS), self._random.randint(1, NUM_TURNS - 2)
        self._wait_until(lambda: self._has_come(place, num_turns))
        time.sleep(self._random.random() * LONGEST_DELAY)
        return place

    def _has_come(self, place: int, num_turns: int) -> bool:
        agent = self._agents[place]
        if agent.has_ended:
            self._finish(agent)
            self._agents[place] = self._new_agent()
            return False
        told: int = httpx.get(f"{self.gateway.address}/sessions/{agent.session_id}").json()["num_turns"]
        return told >= num_turns

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + QUIET_SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.gateway.last_words()
            time.sleep(0.02)

    def _new_agent(self) -> Agent:
        opened = self._post("/sessions")
        number, self.num_sessions = self.num_sessions, self.num_sessions + 1
        api, stream = list(Api)[number % len(Api)], number % 2 == 0
        words = [self.gateway.address, opened["key"], str(number), api.value, str(NUM_TURNS), str(stream)]
        agent = Agent(opened["id"], number, words)
        agent.start()
        return agent

    def _finish(self, agent: Agent) -> None:
        assert agent.process is not None
        output, _ = agent.process.communicate()
        assert agent.process.returncode == 0, self.gateway.last_words()
        self.told += [number_of(json.dumps(reply)) for reply in json.loads(output)]
        first, again = (self._post(f"/sessions/{agent.session_id}/finish") for _ in range(2))
        assert first == again

    def _post(self, path: str) -> Any:
        return httpx.post(self.gateway.address + path, json={}, timeout=30.0).raise_for_status().json()


@dataclass(frozen=True, slots=True)
class Counted:
    """What is left of the turns that agents were told."""

    num_sessions: int
    num_samples: int
    num_told: int
    lost: int
    doubled: int
    not_as_sampled: int
    never_told: int


def number_of(text: str) -> str:
    found = NUMBER.search(text)
    assert found is not None, text
    return found[1]


def count(monkey: Monkey, log: Path) -> Counted:
    tokenizer = app.load_model(with_weights=False).tokenizer
    samples = monkey.gateway.samples()
    found = compare(samples, read_sampled(log))
    trained = Counter(
        number_of(tokenizer.decode(sample.response_token_ids[begin:end], skip_special_tokens=True))
        for sample in samples
        for begin, end in runs_of(sample.loss_mask != 0.0)
    )
    told = Counter(monkey.told)
    return Counted(
        num_sessions=monkey.num_sessions,
        num_samples=len(samples),
        num_told=told.total(),
        lost=(told - trained).total(),
        doubled=(trained - Counter(set(trained))).total() + len(found.doubled),
        not_as_sampled=len(found.unsampled),
        never_told=len(trained.keys() - told.keys()),
    )


@contextmanager
def gateways(folder: Path, *, seed: int) -> Iterator[tuple[Monkey, Path]]:
    """Run a fake engine and a gateway, and give what kills and the file of what was sampled."""
    write_model(folder / "model", app.load_model(with_weights=False).checkpoint)
    log = folder / "sampled.jsonl"
    with (
        serving(ENGINE, [str(folder / "model"), str(log), "30", str(seed)]) as (engine, _),
        GatewayProcess(folder / "gateway", model=folder / "model", engine=engine) as gateway,
    ):
        yield Monkey(gateway, Random(seed)), log


def forget_half(folder: Path) -> None:
    """Cut the journal of a gateway, as a disk does that loses what it was told."""
    path = folder / "turns.journal"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_no_turn_is_lost_or_doubled_when_gateway_and_agents_are_killed(tmp_path: Path) -> None:
    with gateways(tmp_path, seed=1) as (monkey, log):
        with monkey.working():
            for _ in range(15):
                monkey.kill_gateway()
                monkey.kill_agent()
        counted = count(monkey, log)
    assert counted.num_told == counted.num_sessions * NUM_TURNS
    assert counted.num_samples == counted.num_sessions
    assert (counted.lost, counted.doubled, counted.not_as_sampled, counted.never_told) == (0, 0, 0, 0)


@pytest.mark.soak
def test_the_count_sees_turns_that_the_journal_has_lost(tmp_path: Path) -> None:
    with gateways(tmp_path, seed=2) as (monkey, log):
        with monkey.working():
            for _ in range(2):
                monkey.kill_gateway(spoil=forget_half)
        counted = count(monkey, log)
    assert counted.lost > 0
