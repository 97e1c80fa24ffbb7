"""Whether an environment keeps its promises at a level, tried inside a worker.

``rollfeed.environments.level_trial:<name>`` is a function path as in :mod:`rollfeed.environments.verifying`.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from statistics import fmean
from typing import Any, NamedTuple

from rollfeed.environments.builtin import BUILTIN_ENVIRONMENTS
from rollfeed.environments.levels import MAX_FAILURES
from rollfeed.environments.making.maker import TaskFailureKind
from rollfeed.environments.registry import name_in_workers
from rollfeed.environments.tasks import HasGuessRate, NoProblemError, checked_problem, stored
from rollfeed.environments.verifying import environment_in_worker
from rollfeed.faults import describe
from rollfeed.protocols import Environment, MultiTurnEnvironment, ServedEnvironment
from rollfeed.seeds import derive_seed
from rollfeed.types import Correct, Outcome, Verdict

MAX_PROMPT_CHARS = 20_000
"""A level with a longer question is of no use."""
MAX_VERIFY_MS = 50.0
"""CPU time, the mean over all responses that are tried; that of built-in environments, which verify where the run is,
is a tenth of it."""
_MAX_TURNS = 1_000
_FORMS = {"plain": "{}", "tags": "<answer>{}</answer>", "boxed": "\\boxed{{{}}}"}
_NO_ANSWERS = ("", " \n", "?!", "I do not know.", "x" * 5_000, "<answer></answer>", "\\boxed{", "<think>")
_CONSTANTS = ("0", "1", "2", "-1", "10", "yes", "no", "True", "A")


class _Made(NamedTuple):
    question: str
    params: dict[str, Any]
    answer: str | None

    @property
    def digest(self) -> str:
        return blake2b(json.dumps(self, sort_keys=True, default=repr).encode(), digest_size=8).hexdigest()


def level_path(environment_id: str) -> str:
    """Return the function path of :func:`try_level` for an environment."""
    return f"{__name__}:{name_in_workers(environment_id)}"


def __getattr__(name: str) -> Callable[..., dict[str, Any]]:
    return partial(try_level, environment_in_worker(name))


def try_level(
    environment: Environment, level: int, num_problems: int, seconds: float, verifies: bool
) -> dict[str, Any]:
    """Make problems of a level and try what environments promise on them.

    It changes global random states. Problems that are not made, and answers that are not tried, within ``seconds`` are
    left out; without ``verifies`` problems are made only.

    Returns:
        ``digests`` of the problems; ``unusable``, a kind and a cause, where the level has none; ``problems``, what is
        broken; ``warnings``, and numbers for people.
    """
    trial, began = _Trial(environment, level), time.monotonic()
    made = trial.make(num_problems, seconds)
    found: dict[str, Any] = {"digests": [each.digest for each in made], "unusable": trial.unusable}
    if verifies and trial.unusable is None:
        if time.monotonic() - began < 1.5 * seconds:  # else it would take too long; another process makes them as well
            trial.make_again(made)
        found |= trial.verify(made, seconds)
        if isinstance(environment, MultiTurnEnvironment) and not isinstance(environment, ServedEnvironment):
            trial.play(environment, made[0])
        found["mean_prompt_chars"] = round(fmean(len(each.question) for each in made), 1)
    problems = [f"{what}{case}"[:300] for what, case in trial.broken.items()]
    return found | {"problems": problems, "warnings": trial.warnings}


class _Trial:
    """One level under trial."""

    def __init__(self, environment: Environment, level: int) -> None:
        self.environment = environment
        self.level = level
        self.broken: dict[str, str] = {}
        """What is promised and not so, with its first case."""
        self.warnings: list[str] = []
        self.unusable: tuple[str, str] | None = None
        self._indices = 0
        self._milliseconds: list[float] = []

    def _note(self, what: str, case: str = "") -> None:
        self.broken.setdefault(what, case)

    def make(self, num_problems: int, seconds: float) -> list[_Made]:
        """Make problems; each that cannot be made is noted."""
        made, causes, num_in_a_row = list[_Made](), list[tuple[str, str]](), 0
        ends_at = time.monotonic() + seconds
        while len(made) < num_problems and num_in_a_row < MAX_FAILURES and (not made or time.monotonic() < ends_at):
            num_in_a_row += 1
            try:
                made.append(self._problem(self._indices))
                num_in_a_row = 0
            except NoProblemError as error:
                causes.append((TaskFailureKind.NOTHING, str(error)))
            except Exception as error:  # of another package perhaps
                causes.append((TaskFailureKind.RAISED, describe(error)))
            self._indices += 1
        longest = max((len(each.question) for each in made), default=0)
        if causes:
            self.warnings.append(f"{len(causes)} problems cannot be made, the last: {causes[-1][1]}"[:300])
        if num_in_a_row == MAX_FAILURES:
            self.unusable = causes[-1]
        elif longest > MAX_PROMPT_CHARS:
            self.unusable = TaskFailureKind.TOO_LONG, f"a question has {longest:,} characters"
        return made

    def _problem(self, index: int) -> _Made:
        before = _global_state()
        seed = derive_seed(0, "check", self.environment.environment_id, self.environment.version, self.level, index)
        found = self.environment.make(self.level, random.Random(seed))
        if _global_state() != before:
            self._note("make changes the global random state: draw from the Random that it is handed")
        return _Made(*checked_problem(found))

    def make_again(self, made: Sequence[_Made]) -> None:
        """Make the problems in another order and after other global seeds."""
        again: list[str] = []
        for index in reversed(range(self._indices)):
            random.seed(index)
            if (numpy := sys.modules.get("numpy")) is not None:
                numpy.random.seed(index)
            with suppress(Exception):
                again.append(self._problem(index).digest)
        if again[::-1] != [each.digest for each in made]:
            self._note("the same seed makes another problem a second time")

    def verdict(self, made: _Made, response: str) -> Verdict | None:
        """Return a verdict that is one; of one that is not, it is noted why."""
        digest, before, started = made.digest, _global_state(), time.thread_time()
        try:
            verdict = self.environment.verify(made.params, response)
        except Exception as error:
            self._note("verify raises", f" {describe(error)} for {response!r:.60}")
            return None
        self._milliseconds.append(1000 * (time.thread_time() - started))
        if _global_state() != before:
            self._note("verify changes the global random state")
        if made.digest != digest:
            self._note("verify changes the params that it is given")
        return self._sound(verdict, response)

    def _sound(self, verdict: object, response: str) -> Verdict | None:
        if not isinstance(verdict, Verdict):
            self._note("verify returns no Verdict", f", but {verdict!r:.60}")
        elif verdict.outcome is not Outcome.OK:
            self._note("verify fails", f" for {response!r:.60}: {verdict.detail}")
        elif not isinstance(verdict.reward, int | float) or not -1.0 <= verdict.reward <= 1.0:
            self._note("a reward is no number from -1 to 1", f": {verdict.reward!r:.60}")
        elif verdict.correct is Correct.UNDEFINED:
            self._note("a verdict does not say whether the answer is right")
        else:
            return verdict
        return None

    def verify(self, made: Sequence[_Made], seconds: float) -> dict[str, Any]:
        """Try answers to each problem, until a time is over."""
        ends_at, readable, num_tried = time.monotonic() + seconds, set(_FORMS), 0
        commonest = Counter(each.answer for each in made if each.answer is not None).most_common(1)
        guesses = [*_CONSTANTS, *(answer for answer, _ in commonest)]
        num_right: Counter[str] = Counter(dict.fromkeys(["the question", *guesses], 0))
        for each in made:
            known = {} if each.answer is None else {name: form.format(each.answer) for name, form in _FORMS.items()}
            verdicts = {text: self.verdict(each, text) for text in (*known.values(), each.question)}
            accepted = [name for name, text in known.items() if _is_right(verdicts[text])]
            readable &= set(accepted if known else _FORMS)
            if known and not accepted and None not in verdicts.values():
                self._note("its own answer is not accepted", f": {each.answer!r:.60} to {each.question[-60:]!r}")
            self._store(each, verdicts)
            form = _FORMS[accepted[0] if accepted else "plain"]
            blind = {"the question": each.question, **{guess: form.format(guess) for guess in guesses}}
            for text in (*_NO_ANSWERS, *blind.values()):
                if text not in verdicts and time.monotonic() < ends_at:
                    verdicts[text] = self.verdict(each, text)
            num_right.update(guess for guess, text in blind.items() if _is_right(verdicts.get(text)))
            self._compare(each, verdicts)
            num_tried += 1
            if time.monotonic() >= ends_at:
                break
        cost = round(fmean(self._milliseconds or [0.0]), 3)
        limit = MAX_VERIFY_MS / 10 if self.environment in BUILTIN_ENVIRONMENTS else MAX_VERIFY_MS
        if cost > limit:
            self._note(f"verify takes more than {limit:g} ms", f": {cost:g} ms")
        reads = [name for name in _FORMS if name in readable and commonest]
        return {"reads": reads, "guessed": self._guessed(num_right, num_tried), "verify_ms": cost}

    def _store(self, made: _Made, verdicts: Mapping[str, Verdict | None]) -> None:
        """Compare verdicts with those after the params were stored."""
        try:
            after = made._replace(params=stored(made.params))
        except (TypeError, ValueError) as error:
            self._note("params are no JSON", f": {describe(error)}")
            return
        if any(self.verdict(after, text) != verdict for text, verdict in verdicts.items()):
            self._note("a verdict is another one after the params were stored as JSON")

    def _compare(self, made: _Made, verdicts: Mapping[str, Verdict | None]) -> None:
        """Compare the worth of answers, and find those that are none and right."""
        rewards = dict[bool, list[Any]]({True: [], False: []})
        for text, verdict in verdicts.items():
            if verdict is not None:
                rewards[_is_right(verdict)].append(verdict.reward)
            if _is_right(verdict) and text in _NO_ANSWERS and made.answer != "":
                self._note("what is no answer is right", f": {text!r:.60}")
        if max(rewards[False], default=-1.0) > min(rewards[True], default=1.0):
            self._note("a wrong answer is worth more than a right one")

    def _guessed(self, num_right: Counter[str], num_problems: int) -> float:
        """Return the share of problems that the best blind answer solves."""
        ((best, count),) = num_right.most_common(1)
        if isinstance(self.environment, HasGuessRate):
            _, high = self.environment.guess_rate(self.level)
            slack = 4 * math.sqrt(num_problems * high * (1 - high)) + 3  # many environments and answers are tried
            if count > num_problems * high + slack:
                told = f": {best!r:.60} in {count / num_problems:.0%}"
                self._note(f"blind answers are right more often than in {high:.1%}", told)
        elif count > 0.5 * num_problems > 0.5:
            self.warnings.append(f"{best!r:.60} is the answer to {count / num_problems:.0%} of the problems")
        return round(count / num_problems, 3)

    def play(self, environment: MultiTurnEnvironment, made: _Made) -> None:
        """Play episodes of nonsense: they are the same twice, end, and are not right."""
        try:
            for turn in ("", "?!", "0"):
                state, num_turns, verdict = environment.start(made.params), 0, None
                while verdict is None and num_turns < _MAX_TURNS:
                    step, again = (environment.step(stored(dict(state)), turn) for _ in range(2))
                    if step != again:
                        self._note("the same turn in the same state is answered otherwise a second time")
                    num_turns, verdict = num_turns + 1, step.verdict
                    state = step.state if verdict is None else state
                if verdict is None:
                    self.warnings.append(f"episodes of {turn!r} go on after {_MAX_TURNS:,} turns")
                for each in (environment.give_up(state), *(() if verdict is None else (verdict,))):
                    if _is_right(self._sound(each, "an episode")):
                        self._note("an episode of nonsense is right")
        except Exception as error:
            self._note("an episode raises", f" {describe(error)}")


def _is_right(verdict: Verdict | None) -> bool:
    return verdict is not None and verdict.correct is Correct.YES


def _global_state() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    kind, keys, *rest = numpy.random.get_state()
    return random.getstate(), kind, keys.tobytes(), *rest
