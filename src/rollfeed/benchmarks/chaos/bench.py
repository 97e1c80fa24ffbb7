"""A run that is killed again and again, beside one that is not.

What is killed, at random instants: the process of the run, also inside its commits; an engine, which comes back; a
worker that computes rewards. The same command goes on after each end. Then the files are counted by other code than
the run's, and compared with an unbroken run of the same settings.

With agents it is the process, each time in the middle of episodes: as soon as their tool has been called so often.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from os import kill
from pathlib import Path
from random import Random
from signal import SIGKILL
from typing import Any

from rollfeed.benchmarks.chaos.difficulty import learned, wrong_levels
from rollfeed.benchmarks.chaos.effects import Effects, count_effects, num_open_episodes, read_calls
from rollfeed.benchmarks.chaos.job import RUN, SETTINGS, UNBROKEN, UNBROKEN_AGENT, ChaosJob, make_job
from rollfeed.benchmarks.chaos.processes import ChaosEngine, RunProcess, final_ledger
from rollfeed.benchmarks.chaos.recount import Recount, num_reordered, recount
from rollfeed.errors import ConfigError, RunFailedError

MODES = ("sync", "partial", "async")
_NUM_ENGINES = 2
_LATEST = 0.7
"""Of the steps: kills come before, so that the run does not end before them."""
_STEP_SECONDS = 0.5
"""About what a step takes; kills of a running process are spread over so long."""
_START_SECONDS = 6.0
"""The same of a process that is only starting."""
_COMMIT_SECONDS = 0.01
"""And a commit."""
_MOST_CALLS = 40
"""Of a tool, before a kill of an episode."""
_MOST_PROBLEMS = 20
_AWAY_SECONDS = 0.5
"""At most, before an engine is started again; the start takes longer."""


class KillKind(StrEnum):
    """A part of a run that is killed."""

    PROCESS = "process"
    COMMIT = "commit"
    """The process, as soon as a file of a step appears."""
    ENGINE = "engine"
    WORKER = "worker"
    EPISODE = "episode"
    """The process, while agents are between two calls of their tool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chaos:
    """A kind of run, and how often it is broken."""

    num_kills: int
    mode: str = "sync"
    deterministic: bool = False
    agents: bool = False
    """Whether prompts are answered in several turns with a tool between them, and killed there."""
    environments: bool = False
    """Whether prompts are problems of environments whose difficulty adapts, and what is learned of it is compared."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One kill of the plan."""

    kind: KillKind
    step: int
    """It comes when this one has its files, or at once if it has them already."""
    instant: float
    """From 0 to 1: when, of the time that is open to it, at which file of a commit, or after how many calls."""


def bench_chaos(chaos: Chaos, *, keep: Path | None = None, progress: Callable[[str], None]) -> dict[str, Any]:
    """Break a run, count what is left, and return JSON values; ``passed`` says whether all is as it must be.

    ``keep``, an empty or new folder, keeps both runs; by default a temporary one has them.

    Raises:
        ConfigError: If the numbers make no sense, or ``keep`` is not empty.
        RollfeedError: If the unbroken run fails, or a run makes no step for long.
    """
    _check(chaos, keep)
    started, random = time.monotonic(), Random(chaos.seed)
    with ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollfeed-chaos-")))
        engines = [stack.enter_context(ChaosEngine()) for _ in range(2 * _NUM_ENGINES)]
        addresses = [engine.address for engine in engines]
        job = make_job(
            folder.resolve(),
            num_kills=chaos.num_kills,
            mode=chaos.mode,
            deterministic=chaos.deterministic,
            seed=chaos.seed,
            addresses=addresses[:_NUM_ENGINES],
            agents=chaos.agents,
            environments=chaos.environments,
        )
        # The two run beside each other, each with engines of its own.
        undisturbed = _start_unbroken(job, addresses[_NUM_ENGINES:], stack)
        monkey = _Monkey(job, engines[:_NUM_ENGINES], stack, progress)
        code = monkey.run(plan_kills(chaos, job.num_steps, random))
        counts = recount(monkey.process.out, job, ledger=final_ledger(monkey.process.out))
        error = f"exit code {code}: {monkey.process.last_words()}" if code else None
        if undisturbed.wait_for_end():
            raise RunFailedError(f"the unbroken run failed: {undisturbed.last_words()}")
        unbroken = recount(undisturbed.out, job, ledger=final_ledger(undisturbed.out))
        effects = count_effects(monkey.process.out, job)
        unbroken.problems += count_effects(undisturbed.out, job).problems
        levels = {} if error else _levels(monkey.process.out, undisturbed.out, job, counts)
        if chaos.deterministic and levels and not levels["levels_equal"]:
            counts.problems.append("the levels are not those of the unbroken run")
    result = _result(chaos, monkey, counts, unbroken, effects, error)
    return result | levels | {"seconds": time.monotonic() - started}


def _levels(out: Path, unbroken_out: Path, job: ChaosJob, counts: Recount) -> dict[str, Any]:
    """Return what the run has learned of levels, beside the unbroken one; what is wrong goes to the problems."""
    if not job.environments:
        return {}
    state, unbroken = learned(out, job), learned(unbroken_out, job)
    counts.problems += wrong_levels(state, out, num_surplus=final_ledger(out).get("surplus", 0))
    return {
        "levels": {name: each["difficulty"]["policy"]["level"] for name, each in state["environments"].items()},
        "levels_equal": state == unbroken,
    }


def _result(
    chaos: Chaos, monkey: _Monkey, counts: Recount, unbroken: Recount, effects: Effects, error: str | None
) -> dict[str, Any]:
    reordered = num_reordered(counts.trained, unbroken.trained)
    problems = [
        *counts.problems[:_MOST_PROBLEMS],
        *effects.problems[:_MOST_PROBLEMS],
        *(f"unbroken: {each}" for each in unbroken.problems[:_MOST_PROBLEMS]),
    ]
    if monkey.kills.total() < chaos.num_kills:
        problems.append(f"the run ended after {monkey.kills.total()} of {chaos.num_kills} kills")
    wrong = [counts.lost, counts.duplicated, effects.repeated, effects.missing, problems, error]
    return {
        "passed": not any(wrong) and not (chaos.deterministic and reordered),
        "lost": len(counts.lost),
        "duplicated": len(counts.duplicated),
        "reordered": reordered,
        "problems": problems,
        "error": error,
        "kills": {kind.value: monkey.kills[kind] for kind in KillKind},
        "commits_hit": monkey.num_commits_hit,
        "effects": effects.figures(),
        "open_episodes_at_kills": monkey.open_episodes,
        "trained": len(counts.trained),
        "dropped": len(counts.dropped),
        "steps": counts.num_steps,
        "mode": chaos.mode,
        "deterministic": chaos.deterministic,
        "agents": chaos.agents,
        "environments": chaos.environments,
        "seed": chaos.seed,
    }


def plan_kills(chaos: Chaos, num_steps: int, random: Random) -> list[Kill]:
    """Return kills at random steps: rounds of all kinds in random order, none twice in a row; of agents one kind."""
    order = (
        [KillKind.EPISODE] if chaos.agents else [KillKind.COMMIT, KillKind.ENGINE, KillKind.WORKER, KillKind.PROCESS]
    )
    kinds: list[KillKind] = []
    while len(kinds) < chaos.num_kills:
        in_turn = order[: chaos.num_kills - len(kinds)]
        random.shuffle(in_turn)
        if kinds and in_turn[0] is kinds[-1] and len(in_turn) > 1:
            in_turn.append(in_turn.pop(0))
        kinds += in_turn
    steps = sorted(random.randrange(max(1, int(_LATEST * num_steps))) for _ in kinds)
    return [Kill(kind=kind, step=step, instant=random.random()) for kind, step in zip(kinds, steps, strict=True)]


def _check(chaos: Chaos, keep: Path | None) -> None:
    if chaos.num_kills < 1 or chaos.seed < 0:
        raise ConfigError("--kills must be at least 1, --seed at least 0")
    if chaos.mode not in MODES:
        raise ConfigError(f"--mode {chaos.mode}: must be one of {', '.join(MODES)}")
    if chaos.deterministic and chaos.mode == "async":
        raise ConfigError("--deterministic: asynchronous batches have no order to compare; use --mode sync or partial")
    if chaos.agents and chaos.environments:
        raise ConfigError("--agents answer prompts of a data set: leave out --environments")
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise ConfigError(f"--keep {keep}: must be a new or an empty folder")


def _start_unbroken(job: ChaosJob, addresses: Sequence[str], stack: ExitStack) -> RunProcess:
    overrides = [f"engine.sglang.workers={json.dumps(addresses)}", *([UNBROKEN_AGENT] if job.agents else [])]
    process = RunProcess(job.folder / SETTINGS, job.folder / UNBROKEN, overrides=overrides)
    stack.callback(process.kill)
    process.start()
    return process


class _Monkey:
    """Breaks a run."""

    def __init__(
        self, job: ChaosJob, engines: Sequence[ChaosEngine], stack: ExitStack, progress: Callable[[str], None]
    ) -> None:
        self.process = RunProcess(job.folder / SETTINGS, job.folder / RUN)
        stack.callback(self.process.kill)
        self.kills: Counter[KillKind] = Counter()
        self.num_commits_hit = 0
        self.open_episodes: list[int] = []
        """At each kill of an episode: how many had made their first call since it was due, and not their last."""
        self._engines = engines
        self._progress = progress
        self._has_just_started = True

    def run(self, kills: Sequence[Kill]) -> int:
        """Start the run, carry the kills out, and return the exit code of its last process."""
        self.process.start()
        for each in kills:
            step_file = self.process.batch_file(each.step)
            self._has_just_started &= step_file.exists()
            if not self.process.wait_until(step_file.exists):
                break
            self._carry_out(each)
        return self.process.wait_for_end()

    def _carry_out(self, each: Kill) -> None:
        match each.kind:
            case KillKind.PROCESS:
                done = self._kill_process(each.instant)
            case KillKind.COMMIT:
                done = self._kill_in_commit(each.instant)
            case KillKind.ENGINE:
                done = self._kill_engine(each.instant)
            case KillKind.WORKER:
                done = self._kill_worker(each.instant)
            case KillKind.EPISODE:
                done = self._kill_episode(each.instant)
        self.kills[each.kind] += done
        self._has_just_started &= each.kind in (KillKind.PROCESS, KillKind.COMMIT, KillKind.EPISODE)
        if done:
            self._progress(f"{each.kind} killed at step {each.step} of the plan, {self.process.num_steps()} steps done")

    def _kill_process(self, instant: float) -> bool:
        time.sleep(instant * (_START_SECONDS if self._has_just_started else _STEP_SECONDS))
        return self._end_and_go_on()

    def _kill_in_commit(self, instant: float) -> bool:
        step = self.process.num_steps()
        has_come = partial(self.process.is_committing, step, instant=instant)
        return self.process.wait_until(has_come, poll_seconds=_COMMIT_SECONDS / 10) and self._end_and_go_on()

    def _kill_episode(self, instant: float) -> bool:
        out, most = self.process.out, 1 + int(instant * _MOST_CALLS)
        before = read_calls(out)
        if not self.process.wait_until(lambda: read_calls(out).total() >= before.total() + most):
            return False
        if not self._end_and_go_on():
            return False
        self.open_episodes.append(num_open_episodes(read_calls(out) - before))
        return True

    def _end_and_go_on(self) -> bool:
        if self.process.has_ended:
            return False
        self.process.kill()
        self.num_commits_hit += self.process.is_mid_commit()
        self.process.start()
        self._has_just_started = True
        return True

    def _kill_engine(self, instant: float) -> bool:
        for engine in self._engines:  # one is always there
            engine.wait_until_ready()
        chosen = self._engines[int(instant * len(self._engines))]
        chosen.kill()
        time.sleep(instant * _AWAY_SECONDS)
        chosen.start()
        return True

    def _kill_worker(self, instant: float) -> bool:
        time.sleep(instant * _STEP_SECONDS)
        if not self.process.wait_until(lambda: bool(self.process.worker_pids())):
            return False
        pids = self.process.worker_pids()
        if pids:
            kill(pids[int(instant * len(pids))], SIGKILL)
        return bool(pids)
