"""Checks of the turns that weights and logprobs claim to have been sampled, by what the chat template puts around them.

A turn begins where the template opens one, or with the response. It ends with a token that ends turns, and that is the
only one in it; otherwise a limit has ended it, a stop string, or the episode.

Axes: R response tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from rollfeed.base.true_runs import Run, runs_of
from rollfeed.lint.findings import Flaw
from rollfeed.lint.marks import Marks
from rollfeed.lint.numbers import Spot, shift_of
from rollfeed.lint.subject import Subject
from rollfeed.protocols import ENDED_BY, STOPPED_AT
from rollfeed.types import SampleStatus


class Turns:
    """The claimed turns of one sample. What needs a tokenizer is not checked where ``marks`` is None."""

    def __init__(self, subject: Subject, marks: Marks | None) -> None:
        self._subject, self._marks = subject, marks
        self._ids = subject.response_ids
        mask, logprobs = subject.loss_mask, subject.logprobs
        length = subject.response_length
        self.trained = np.ones(length, np.bool_) if mask is None else mask > 0.0
        has_logprobs = logprobs is not None and not subject.is_taught and not np.isnan(logprobs).all()
        self.has_logprobs = has_logprobs and bool(np.nan_to_num(logprobs).any())  # type: ignore[arg-type]
        self.with_logprob = np.zeros(length, np.bool_)
        if self.has_logprobs and logprobs is not None:
            self.with_logprob = np.isfinite(logprobs) & (logprobs != 0.0)
        self.sampled = self.trained | self.with_logprob
        self.runs = runs_of(self.sampled)
        self._boundaries = {start for start, _, _ in subject.spans or ()}

    def check(self, *, response_limit: int | None) -> Iterator[Spot]:
        """Yield what is wrong with them; a shift is one finding, and the others would only follow from it."""
        if self.has_logprobs and not self._subject.has_rounded_logprobs:
            shift = shift_of(self.trained, self.with_logprob, self._boundaries)
            if shift:
                yield self._shifted(shift)
                return
        if self._marks is None:
            return
        for run in runs_of((self._ids[:, None] == self._marks.once_ids).any(axis=1) & ~self.sampled):
            yield Spot(Flaw.DOUBLED_BOS, *run, "what a text begins with stands in the middle")
        if self.trained[:1].any() and (length := self._rest_of_opening()):
            detail = f"{length} tokens that open the turn are in the response, with weight"
            yield Spot(Flaw.PROMPT_TRAINED, 0, length, detail)
            return
        for number, run in enumerate(self.runs):
            yield from self._check_turn(run, is_first=number == 0, before=self.runs[number - 1].end if number else 0)
        yield from self._check_end(response_limit)

    def _shifted(self, shift: int) -> Spot:
        marks, length = self._marks, len(self._ids)
        how = f"{abs(shift)} {'behind' if shift > 0 else 'before'}"
        if shift == -1 and marks is not None and not (self.trained & ~self.with_logprob).any():
            lost = np.flatnonzero(self.with_logprob & ~self.trained)
            if marks.is_end(self._ids[lost]).all():
                first = int(lost[0])
                return Spot(Flaw.MISSING_END_OF_TURN, first, first + 1, "the sampled end of the turn has no weight")
        if marks is not None and self._is_clean(self.trained) and not self._is_clean(self.with_logprob):
            return Spot(Flaw.LOGPROB_OF_ANOTHER_TOKEN, 0, length, f"the weights lie {how} the logprobs")
        return Spot(Flaw.SHIFTED_MASK, 0, length, f"the weights lie {how} the logprobs")

    def _is_clean(self, flags: NDArray[np.bool_]) -> bool:
        """Whether runs have no end of a turn but as their last token, and begin where turns do."""
        marks = self._marks
        assert marks is not None
        runs = runs_of(flags)
        ends = all(not marks.is_end(self._ids[run.start : run.end - 1]).any() for run in runs)
        return ends and all(not marks.openings or marks.opens(self._ids[: run.start]) for run in runs[1:])

    def _check_turn(self, run: Run, *, is_first: bool, before: int) -> Iterator[Spot]:
        marks, ids = self._marks, self._ids
        assert marks is not None
        start, end = run
        told = ids[before:start]
        if not is_first and marks.is_told(told) and marks.opening_in(told) is None:
            yield self._not_opened(run)
            return
        ends = np.flatnonzero(marks.is_end(ids[start : end - 1])) + start
        if len(ends):
            first = int(ends[0]) + 1
            length = marks.opening_in(ids[first:end])
            yield self._inserted(Run(first, end if length is None else min(end, first + length)))
            return
        if marks.is_end(ids[end - 1 : end]).any():
            is_silenced = end - start > 1 and self.trained[end - 2] and not self.trained[end - 1]
            if is_silenced and end - 1 not in self._boundaries:
                yield Spot(Flaw.MISSING_END_OF_TURN, end - 1, end, "the sampled end of the turn has no weight")
            return
        if end < len(ids) and (marks.ends_turns or self._is_raw) and not marks.is_end(ids[end : end + 1]).any():
            if marks.ends_at_stop(ids[start:end]):
                return
            is_in_told = not is_first and bool(marks.openings) and not marks.opens(told)
            if is_in_told or not self.trained[start:end].any():
                yield self._inserted(run)
            else:
                yield Spot(Flaw.MISSING_END_OF_TURN, end - 1, end, "nothing ends the turn, and others speak behind it")

    def _rest_of_opening(self) -> int:
        """Return how many response tokens belong to the opening of the first turn."""
        marks, ids, first = self._marks, self._subject.tokens, self._subject.prompt_length
        assert marks is not None
        if not marks.openings or self._subject.is_taught or marks.opens(ids[:first]):
            return 0
        longest = max(map(len, marks.openings))
        lengths = range(1, min(self.runs[0].end, longest) + 1)
        return next((length for length in lengths if marks.opens(ids[: first + length])), 0)

    def _not_opened(self, run: Run) -> Spot:
        """Return what a turn is that begins before its opening has ended."""
        marks, (start, end) = self._marks, run
        assert marks is not None
        longest = max(map(len, marks.openings), default=0)
        for behind in range(start + 1, min(end, start + longest) + 1):
            if marks.opens(self._ids[:behind]):
                return self._inserted(Run(start, behind))
        length = marks.opening_in(self._ids[start:end])
        if length is not None:
            return self._inserted(Run(start, min(end, start + length)))
        if end < len(self._ids) and not marks.is_end(self._ids[end - 1 : end]).any():
            return self._inserted(run)
        return Spot(Flaw.TEMPLATE_BREAK, start, start + 1, "a turn begins where the chat template opens none")

    def _inserted(self, run: Run) -> Spot:
        """Return what tokens are that the policy cannot have sampled."""
        count = int(self.trained[run.start : run.end].sum())
        if not count:
            return Spot(Flaw.LOGPROB_OF_ANOTHER_TOKEN, *run, "tokens that were told to the policy have logprobs")
        return Spot(Flaw.TOOL_TOKEN_TRAINED, *run, f"{count} tokens that were told to the policy are trained")

    def _check_end(self, response_limit: int | None) -> Iterator[Spot]:
        """Yield why a sample cannot have been completed."""
        marks, subject, ids = self._marks, self._subject, self._ids
        assert marks is not None
        if subject.status is not SampleStatus.COMPLETED or not self.runs or subject.is_taught:
            return
        start, end = self.runs[-1]
        if limit := subject.metadata.get(ENDED_BY):
            yield Spot(Flaw.TRUNCATED_MARKED_COMPLETE, end - 1, end, f"completed, and {limit} ended it")
            return
        last, stop = ids[end - 1 : end], subject.metadata.get(STOPPED_AT)
        if marks.is_end(last).any() or marks.ends_at_stop(ids[start:end], () if stop is None else (str(stop),)):
            return
        if end == len(ids) and response_limit is not None and len(ids) >= response_limit:
            detail = f"completed at the limit of {response_limit} tokens, and nothing ends the turn"
            yield Spot(Flaw.TRUNCATED_MARKED_COMPLETE, end - 1, end, detail)
        elif end == len(ids):
            yield Spot(Flaw.MISSING_END_OF_TURN, end - 1, end, "completed, and nothing ends the turn")
        elif end == len(ids) - 1 and marks.is_end(ids[end:]).any():
            yield Spot(Flaw.MISSING_END_OF_TURN, end, end + 1, "completed, and the end of the turn has no weight")

    @property
    def _is_raw(self) -> bool:
        prompt = self._subject.prompt
        return prompt is not None and prompt.messages is None
