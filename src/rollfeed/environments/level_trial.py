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
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from statistics import fmean
from typing import Any, NamedTuple

from rollfeed.environments.builtin import BUILTIN_ENVIRONMENTS
from rollfeed.environments.making.maker import TaskFailureKind
from rollfeed.environments.tasks import HasGuessRate, NoProblemError, stored
from rollfeed.environments.verifying import environment_in_worker, name_in_workers
from rollfeed.faults import describe
from rollfeed.protocols import Environment, EnvironmentStep, MultiTurnEnvironment
from rollfeed.seeds import derive_seed
from rollfeed.types import Correct, Outcome, Verdict

MAX_PROMPT_CHARS = 20_000
"""A level with a longer question is of no use."""
MAX_VERIFY_MS = 50.0
"""CPU time, the mean over all responses that are tried; that of built-in environments, which verify where the run is,
is a tenth of it."""
_MAX_FAILURES = 5
"""Problems in a row that cannot be made, after which a level counts as having none."""
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
        return blake2b(json.dumps(self, sort_keys=True).encode(), digest_size=8).hexdigest()


def level_path(environment_id: str) -> str:
    """Return the function path of :func:`try_level` for an environment."""
    return f"{__name__}:{name_in_workers(environment_id)}"


def __getattr__(name: str) -> Callable[..., dict[str, Any]]:
    return partial(try_level, environment_in_worker(name))


def try_level(
    environment: Environment, level: int, num_problems: int, seconds: float, verifies: bool
) -> dict[str, Any]:
    """Make problems of a level and try what environments promise on them.

    Args:
        environment: In a process where global random states may be changed.
        level: That it has.
        num_problems: One is tried at least.
        seconds: Of making problems, and of trying answers to them: what comes after is left out.
        verifies: Whether to try anything but making them.

    Returns:
        ``digests`` of the problems; ``unusable``, a kind and a cause, where the level has none; ``problems``, what is
        broken; ``warnings``, and numbers for people.
    """
    trial = _Trial(environment, level)
    made = trial.make(num_problems, seconds)
    found: dict[str, Any] = {"digests": [each.digest for each in made], "unusable": trial.unusable}
    if verifies and trial.unusable is None:
        trial.make_again(made)
        found |= trial.verify(made, seconds)
        if isinstance(environment, MultiTurnEnvironment):
            trial.play(environment, made[0])
        found["mean_prompt_chars"] = round(fmean(len(each.question) for each in made), 1)
    return found | {"problems": list(trial.problems), "warnings": list(trial.warnings)}


class _Trial:
    """One level under trial; a broken promise is noted once, with its first case."""

    def __init__(self, environment: Environment, level: int) -> None:
        self.environment = environment
        self.level = level
        self.problems: dict[str, None] = {}
        self.warnings: dict[str, None] = {}
        self.unusable: tuple[str, str] | None = None
        self._said: set[str] = set()
        self._milliseconds: list[float] = []

    def broken(self, what: str, case: str = "") -> None:
        if what not in self._said:
            self._said.add(what)
            self.problems[f"{what}{case}"[:300]] = None

    def make(self, num_problems: int, seconds: float) -> list[_Made]:
        made: list[_Made] = []
        ends_at, num_failed, index = time.monotonic() + seconds, 0, 0
        while len(made) < num_problems and (not made or time.monotonic() < ends_at):
            try:
                made.append(self._problem(index))
            except Exception as error:  # of another package perhaps
                is_nothing = isinstance(error, NoProblemError)
                cause = str(error) if is_nothing else describe(error)
                num_failed += 1
                self.warnings = {f"{index - len(made) + 1} problems cannot be made, the last: {cause}"[:300]: None}
                if num_failed == _MAX_FAILURES:
                    self.unusable = TaskFailureKind.NOTHING if is_nothing else TaskFailureKind.RAISED, cause
                    break
            else:
                num_failed = 0
            index += 1
        longest = max((len(each.question) for each in made), default=0)
        if longest > MAX_PROMPT_CHARS:
            self.unusable = TaskFailureKind.TOO_LONG, f"a question has {longest:,} characters"
        self._indices = index
        return made

    def _problem(self, index: int) -> _Made:
        before = _global_state()
        seed = derive_seed(0, "check", self.environment.environment_id, self.environment.version, self.level, index)
        found = self.environment.make(self.level, random.Random(seed))
        if _global_state() != before:
            self.broken("make changes the global random state: draw from the Random that it is handed")
        if not (isinstance(found, tuple | list) and len(found) == 3 and isinstance(found[0], str) and found[0].strip()):
            raise NoProblemError(f"make returned {found!r:.80}; it must return question, params and answer")
        return _Made(*found)

    def make_again(self, made: Sequence[_Made]) -> None:
        """Make the problems in another order and after other global seeds."""
        again: dict[int, str] = {}
        for index in reversed(range(self._indices)):
            random.seed(index)
            if (numpy := sys.modules.get("numpy")) is not None:
                numpy.random.seed(index)
            try:
                again[index] = self._problem(index).digest
            except Exception:
                continue
        if [again[index] for index in sorted(again)] != [each.digest for each in made]:
            self.broken("the same seed makes another problem a second time")

    def verdict(self, made: _Made, response: str) -> Verdict | None:
        """Return a verdict that is one; of one that is not, it is noted why."""
        params = json.dumps(made.params, sort_keys=True)
        before, started = _global_state(), time.thread_time()
        try:
            verdict = self.environment.verify(made.params, response)
        except Exception as error:
            self.broken("verify raises", f" {describe(error)} for {response!r:.60}")
            return None
        self._milliseconds.append(1000 * (time.thread_time() - started))
        if _global_state() != before:
            self.broken("verify changes the global random state")
        if json.dumps(made.params, sort_keys=True) != params:
            self.broken("verify changes the params that it is given")
        return verdict if self.is_sound(verdict, response) else None

    def is_sound(self, verdict: object, response: str) -> bool:
        if not isinstance(verdict, Verdict):
            self.broken("verify returns no Verdict", f", but {verdict!r:.60}")
        elif verdict.outcome is not Outcome.OK:
            self.broken("verify fails", f" for {response!r:.60}: {verdict.detail}")
        elif not isinstance(verdict.reward, int | float) or not -1.0 <= verdict.reward <= 1.0:
            self.broken("a reward is no number from -1 to 1", f": {verdict.reward!r:.60}")
        elif verdict.correct is Correct.UNDEFINED:
            self.broken("a verdict does not say whether the answer is right")
        else:
            return True
        return False

    def verify(self, made: Sequence[_Made], seconds: float) -> dict[str, Any]:
        """Try answers to each problem, until a time is over."""
        readable, num_tried, ends_at = set(_FORMS), 0, time.monotonic() + seconds
        commonest = Counter(each.answer for each in made if each.answer is not None).most_common(1)
        guesses = [*_CONSTANTS, *(answer for answer, _ in commonest)]
        num_right = dict.fromkeys(["the question", *guesses], 0)
        right, wrong = list[float](), list[float]()
        for each in made:
            accepted = self._try_known_answer(each)
            readable &= accepted
            form = _FORMS[next((name for name in _FORMS if name in accepted), "plain")]
            blind = {"the question": each.question, **{guess: form.format(guess) for guess in guesses}}
            known = () if each.answer is None else (form.format(each.answer),)
            yes = set[str]()
            for text in dict.fromkeys([*known, *_NO_ANSWERS, *blind.values()]):
                verdict = self.verdict(each, text) if time.monotonic() < ends_at or text in known else None
                if verdict is None:
                    continue
                is_right = verdict.correct is Correct.YES
                (right if is_right else wrong).append(float(verdict.reward))  # type: ignore[arg-type]
                if is_right:
                    yes.add(text)
                    if text in _NO_ANSWERS and each.answer != "":
                        self.broken("what is no answer is right", f": {text!r:.60}")
            for guess, text in blind.items():
                num_right[guess] += text in yes
            num_tried += 1
            if time.monotonic() >= ends_at:
                break
        if right and max(wrong, default=-1.0) > min(right):
            self.broken("a wrong answer is worth more than a right one")
        cost = round(fmean(self._milliseconds or [0.0]), 3)
        limit = MAX_VERIFY_MS / 10 if self.environment in BUILTIN_ENVIRONMENTS else MAX_VERIFY_MS
        if cost > limit:
            self.broken(f"verify takes more than {limit:g} ms", f": {cost:g} ms")
        reads = [name for name in _FORMS if name in readable and commonest]
        return {"reads": reads, "guessed": self._guessed(num_right, num_tried), "verify_ms": cost}

    def _try_known_answer(self, made: _Made) -> set[str]:
        """Return the forms in which a known answer is accepted; all where there is none."""
        if made.answer is None:
            return set(_FORMS)
        verdicts = {name: self.verdict(made, form.format(made.answer)) for name, form in _FORMS.items()}
        accepted = {name for name, found in verdicts.items() if found is not None and found.correct is Correct.YES}
        if not accepted and None not in verdicts.values():
            self.broken("its own answer is not accepted", f": {made.answer!r:.60} to {made.question[-60:]!r}")
        try:
            after = made._replace(params=stored(made.params))
        except (TypeError, ValueError) as error:
            self.broken("params are no JSON", f": {describe(error)}")
            return accepted
        if {name: self.verdict(after, form.format(made.answer)) for name, form in _FORMS.items()} != verdicts:
            self.broken("a verdict is another one after the params were stored as JSON")
        return accepted

    def _guessed(self, num_right: dict[str, int], num_problems: int) -> float:
        """Return the share of problems that the best blind answer solves."""
        best = max(num_right, key=num_right.__getitem__)
        share = num_right[best] / num_problems
        if isinstance(self.environment, HasGuessRate):
            _, high = self.environment.guess_rate(self.level)
            slack = 4 * math.sqrt(num_problems * high * (1 - high)) + 3  # many environments and answers are tried
            if num_right[best] > num_problems * high + slack:
                self.broken(f"blind answers are right more often than in {high:.1%}", f": {best!r:.60} in {share:.0%}")
        elif share > 0.5 and num_problems > 1:
            self.warnings[f"{best!r:.60} is the answer to {share:.0%} of the problems"] = None
        return round(share, 3)

    def play(self, environment: MultiTurnEnvironment, made: _Made) -> None:
        """Play episodes of nonsense: they are the same twice, end, and are not right."""
        try:
            for turn in ("", "?!", "0"):
                state = environment.start(made.params)
                for _ in range(_MAX_TURNS):
                    step, again = (environment.step(stored(dict(state)), turn) for _ in range(2))
                    if step != again:
                        self.broken("the same turn in the same state is answered otherwise a second time")
                    if step.verdict is not None:
                        break
                    state = step.state
                self._end(environment, step, state)
        except Exception as error:
            self.broken("an episode raises", f" {describe(error)}")

    def _end(self, environment: MultiTurnEnvironment, step: EnvironmentStep, state: Any) -> None:
        if step.verdict is None:
            self.warnings[f"an episode of nonsense goes on after {_MAX_TURNS:,} turns"] = None
        for verdict in (environment.give_up(state), *([] if step.verdict is None else [step.verdict])):
            if self.is_sound(verdict, "an episode") and verdict.correct is Correct.YES:
                self.broken("an episode of nonsense is right")


def _global_state() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    kind, keys, *rest = numpy.random.get_state()
    return random.getstate(), kind, keys.tobytes(), *rest
