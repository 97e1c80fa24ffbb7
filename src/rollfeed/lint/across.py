"""Checks that need more than one sample: turns trained twice, and what is odd beside the others of a run.

What is odd is decided when all has been seen: a logprob of exactly 0.0 is that of a token of probability 1, or of one
that nobody sampled, and only the others tell which of the two is usual here.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import numpy as np

from rollfeed.base.true_runs import Run, runs_of
from rollfeed.lint.findings import Finding, Flaw, SamplePlace
from rollfeed.lint.marks import Marks
from rollfeed.lint.numbers import Spot, finding
from rollfeed.lint.subject import Subject
from rollfeed.lint.turns import Turns
from rollfeed.types import SampleStatus

_MOST_TURNS = 1 << 18
"""That are remembered, to find one again."""
_MOST_ODD = 10_000
_LEAST_CERTAIN = -1e-3
"""A turn is told from another by its logprobs if one is below."""
_FEWEST_ENDS, _MANY_ENDS, _USUAL_END, _RARE_END = 4, 100, 0.5, 0.1


@dataclass(slots=True)
class _Odd:
    """Candidates of one kind, of which the last word is spoken at the end."""

    found: list[tuple[int, Finding]]
    """Each with the number that decides about it."""
    counts: Counter[int]


class Across:
    """Remembers what it needs of the samples of a run."""

    def __init__(self) -> None:
        self._turns: OrderedDict[tuple[Hashable, int], SamplePlace] = OrderedDict()
        self._zeros = _Odd([], Counter())
        self._firsts = _Odd([], Counter())
        self._ends = Counter[int]()
        self._ended: list[tuple[int, int | None, Finding]] = []
        """The last token of a turn, and what follows it; None where the last token has no weight."""
        self._has_logprobs = False

    def check(self, subject: Subject, turns: Turns, marks: Marks | None) -> Iterator[Finding]:
        """Yield turns that another sample of the rollout is trained on, and remember the rest."""
        yield from self._check_twice(subject, turns, marks)
        self._note_zeros(subject, turns, marks)
        if marks is None:
            self._note_without_tokenizer(subject, turns)

    def finish(self) -> Iterator[Finding]:
        """Yield what was odd."""
        singles = self._zeros.counts[1]
        least = 2 if not singles else min(16, 2 + math.ceil(math.log2(100 * singles)))
        if self._has_logprobs:
            yield from (found for length, found in self._zeros.found if length >= least)
        if len(self._firsts.counts) == 1 and 2 * len(self._firsts.found) <= self._firsts.counts.total():
            yield from (found for _, found in self._firsts.found)
        yield from self._odd_ends()

    def _odd_ends(self) -> Iterator[Finding]:
        total = self._ends.total()
        usual, count = max(self._ends.items(), key=lambda each: each[1], default=(-1, 0))
        if total < _FEWEST_ENDS or count < _USUAL_END * total:
            return
        for last, behind, found in self._ended:
            is_rare = self._ends[last] <= max(1, _RARE_END * total)
            if (last == usual) if behind is None else (is_rare and behind != usual):
                yield found

    def _check_twice(self, subject: Subject, turns: Turns, marks: Marks | None) -> Iterator[Finding]:
        logprobs = subject.logprobs
        if subject.rollout is None or logprobs is None or not turns.has_logprobs or subject.has_rounded_logprobs:
            return
        for run in runs_of(turns.trained):
            said = logprobs[run.start : run.end]
            if not (said < _LEAST_CERTAIN).any():
                continue
            key = (subject.rollout, hash((subject.response_ids[run.start : run.end].tobytes(), said.tobytes())))
            before = self._turns.setdefault(key, subject.place)
            if before != subject.place:
                where = f"sample {before.sample} ({before.source})"
                found = Spot(Flaw.FORK_TRAINED_TWICE, *run, f"{where} of the same rollout is trained on this turn, too")
                yield finding(subject, found, marks)
        while len(self._turns) > _MOST_TURNS:
            self._turns.popitem(last=False)

    def _note_zeros(self, subject: Subject, turns: Turns, marks: Marks | None) -> None:
        if subject.logprobs is None or subject.is_taught or subject.has_rounded_logprobs:
            return
        self._has_logprobs = self._has_logprobs or turns.has_logprobs
        trained = {run.start: run.end for run in runs_of(turns.trained)}
        for run in runs_of(turns.trained & (subject.logprobs == 0.0)):
            length = run.end - run.start
            self._zeros.counts[length] += 1
            if length > 1 and len(self._zeros.found) < _MOST_ODD:
                is_whole = trained.get(run.start) == run.end
                kind = Flaw.RETOKENISED_TURN if is_whole else Flaw.TOOL_TOKEN_TRAINED
                what = "a turn is trained" if is_whole else f"{length} tokens are trained"
                found = Spot(kind, *run, f"{what} without a logprob, as what nobody sampled has none")
                self._zeros.found.append((length, finding(subject, found, marks)))

    def _note_without_tokenizer(self, subject: Subject, turns: Turns) -> None:
        ids, before = subject.tokens, -subject.prompt_length
        if len(ids) > 1:
            first = int(ids[0])
            self._firsts.counts[first] += 1
            if first == int(ids[1]) and len(self._firsts.found) < _MOST_ODD:
                found = Spot(Flaw.DOUBLED_BOS, before, before + 2, f"begins with {first} twice, others once")
                self._firsts.found.append((first, finding(subject, found, None)))
        for run in turns.runs:
            self._note_end(subject, turns, run)

    def _note_end(self, subject: Subject, turns: Turns, run: Run) -> None:
        """Keep how a turn ends, and what would be wrong if others end otherwise."""
        ids, (start, end) = subject.response_ids, run
        is_last = end == len(ids)
        if is_last and subject.status is not SampleStatus.COMPLETED:
            return
        last = int(ids[end - 1])
        self._ends[last] += 1
        is_silenced = end - start > 1 and turns.trained[end - 2] and not turns.trained[end - 1]
        kind = Flaw.TRUNCATED_MARKED_COMPLETE if is_last and not is_silenced else Flaw.MISSING_END_OF_TURN
        told = "has no weight" if is_silenced else "ends it, where another token ends most"
        behind = None if is_silenced else -1 if is_last else int(ids[end])
        is_usual = self._ends[last] > max(_MANY_ENDS, _USUAL_END * self._ends.total())
        if len(self._ended) < _MOST_ODD and (is_silenced or not is_usual):
            spot = Spot(kind, end - 1, end, f"the last token of a turn, {last}, {told}")
            self._ended.append((last, behind, finding(subject, spot, None)))


def hides_zeros(values: np.ndarray) -> bool:
    """Whether logprobs have been rounded so far that 0.0 may stand for a small one: to five decimals or fewer."""
    told = values[np.isfinite(values) & (values != 0.0)].astype(np.float64)
    return bool(len(told) > 1 and np.allclose(told, np.round(told, 5), rtol=0.0, atol=1e-7))
