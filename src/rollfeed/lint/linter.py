"""Looks at samples one after the other, in memory that does not grow with their number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import numpy as np

from rollfeed.base.true_runs import runs_of
from rollfeed.conversations import LossMaskType
from rollfeed.conversations.pairs import PAIR
from rollfeed.lint.across import Across
from rollfeed.lint.findings import Flaw, Report
from rollfeed.lint.marks import Marks
from rollfeed.lint.numbers import Spot, check_numbers, check_prompt, check_shape, check_versions, finding, is_tokenised
from rollfeed.lint.subject import Subject
from rollfeed.lint.taught import check_taught
from rollfeed.lint.turns import Turns

_LEAST_COPIED = 40
"""Characters of a prompt that nobody says by chance."""
NO_TOKENS = "tokens, masks, logprobs and versions: the format has none"
NO_MASK = "masks: the format has none, and all response tokens count as trained"
NO_LOGPROBS = "logprobs: there are none"
NO_TOKENIZER = "turns and the chat template: give --tokenizer"
NO_VERSIONS = "policy versions: the format has none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Says what is known of how samples were made."""

    response_limit: int | None = None
    """Tokens of a response at most."""
    mask_type: LossMaskType | None = None
    """Of conversations that are taught; None where answers are sampled."""
    recorded: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    """Turns as they were sampled, by session: the hash of the logprobs' bytes by that of the ids'."""


class Linter:
    """Collects what is wrong with samples.

    ``marks`` is None without a tokenizer; ``expected`` is what is known of how samples were made.
    """

    def __init__(self, marks: Marks | None, expected: Expected | None = None) -> None:
        self.report = Report()
        self._marks, self._expected = marks, expected or Expected()
        self._across = Across()
        # Samples of a prompt come one after the other, and a long one takes its time.
        self._tokenised = None if marks is None else lru_cache(maxsize=1)(partial(is_tokenised, marks.tokenizer))

    def check(self, subject: Subject) -> Turns | None:
        """Check one sample; return its turns, where there are any to be looked at further."""
        report, marks = self.report, self._marks
        report.num_samples += 1
        report.num_tokens += len(subject.tokens)
        if subject.token_ids is None:
            report.unchecked[NO_TOKENS] += 1
            for found in _check_texts(subject, marks):
                report.add(finding(subject, found, marks))
            return None
        if shape := list(check_shape(subject)):
            for found in (*shape, *check_versions(replace(subject, max_staleness=None), np.empty(0, np.bool_))):
                report.add(finding(subject, found, marks))
            return None
        if subject.is_removed:
            subject = replace(subject, loss_mask=np.zeros(subject.response_length, np.float32))
        self._note_unchecked(subject)
        turns = Turns(subject, marks)
        for found in self._found(subject, turns):
            report.add(finding(subject, found, marks))
        for each in self._across.check(subject, turns, marks):
            report.add(each)
        return turns

    def finish(self) -> Report:
        """Return the report, with what only all samples together tell."""
        for found in self._across.finish():
            self.report.add(found)
        return self.report

    def _found(self, subject: Subject, turns: Turns) -> Iterator[Spot]:
        marks, expected, prompt = self._marks, self._expected, subject.prompt
        yield from check_numbers(subject, turns.trained)
        yield from check_versions(subject, turns.trained)
        is_pair = prompt is not None and PAIR in prompt.metadata
        if (
            subject.is_taught
            and not is_pair
            and marks is not None
            and prompt is not None
            and expected.mask_type is not None
        ):
            yield from check_taught(subject, prompt, marks, mask_type=expected.mask_type)
            return
        yield from check_prompt(subject, turns.trained, marks, tokenised=self._tokenised)
        yield from turns.check(response_limit=expected.response_limit)
        recorded = expected.recorded.get(str(subject.metadata.get("session_id")))
        if recorded is not None:
            yield from _check_recorded(subject, turns, recorded)

    def _note_unchecked(self, subject: Subject) -> None:
        missing = {
            NO_TOKENIZER: self._marks is None,
            NO_MASK: subject.loss_mask is None,
            NO_LOGPROBS: subject.logprobs is None and not subject.is_taught,
            NO_VERSIONS: subject.spans is None and not subject.versions and not subject.is_taught,
        }
        self.report.unchecked.update(what for what, is_missing in missing.items() if is_missing)


def _check_texts(subject: Subject, marks: Marks | None) -> Iterator[Spot]:
    """Yield what is wrong with a sample of which there is text only: little can be seen there."""
    asked, said = subject.texts.get("prompt", ""), subject.texts.get("response", "")
    if len(asked) >= _LEAST_COPIED and said.startswith(asked):
        yield Spot(Flaw.PROMPT_TRAINED, 0, 0, "the response begins with the whole prompt")
    if marks is not None and marks.begins_twice(marks.tokenizer.encode(asked[:64], add_special_tokens=False)):
        yield Spot(Flaw.DOUBLED_BOS, 0, 0, "the prompt begins with a special token, twice")


def _check_recorded(subject: Subject, turns: Turns, recorded: Mapping[int, int]) -> Iterator[Spot]:
    """Yield turns that are not as they were recorded when they were sampled."""
    for run in runs_of(turns.trained):
        ids = hash(subject.response_ids[run.start : run.end].tobytes())
        if ids not in recorded:
            yield Spot(Flaw.RETOKENISED_TURN, *run, "no turn of its session was sampled so")
        elif subject.logprobs is not None and hash(subject.logprobs[run.start : run.end].tobytes()) != recorded[ids]:
            yield Spot(Flaw.LOGPROB_OF_ANOTHER_TOKEN, *run, "the turn was sampled with other logprobs")
