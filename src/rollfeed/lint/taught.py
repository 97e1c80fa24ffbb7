"""Checks of samples whose answers a data set brings: tokens and weights are derived again, and must be the same."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rollfeed.base.true_runs import runs_of
from rollfeed.conversations import LossMaskType, answered_prompt
from rollfeed.errors import ConfigError
from rollfeed.lint.findings import Flaw
from rollfeed.lint.marks import Marks
from rollfeed.lint.numbers import Spot
from rollfeed.lint.subject import Subject
from rollfeed.types import Prompt


def check_taught(subject: Subject, prompt: Prompt, marks: Marks, *, mask_type: LossMaskType) -> Iterator[Spot]:
    """Yield where a sample differs from what its conversation is rendered and masked to."""
    try:
        shown = answered_prompt(prompt, tokenizer=marks.tokenizer, mask_type=mask_type)
    except ConfigError as error:
        yield Spot(Flaw.TEMPLATE_BREAK, 0, subject.response_length, f"the conversation cannot be rendered: {error}")
        return
    ids, before = subject.tokens, -subject.prompt_length
    if not np.array_equal(ids, shown.token_ids):
        common = min(len(ids), len(shown.token_ids))
        differing = np.flatnonzero(ids[:common] != shown.token_ids[:common])
        first = int(differing[0]) if len(differing) else common
        is_answer = first >= int(np.argmax(shown.loss_mask))
        kind = Flaw.RETOKENISED_TURN if is_answer else Flaw.PROMPT_TOKENS
        if np.array_equal(ids[1:], shown.token_ids):
            kind = Flaw.DOUBLED_BOS
        elif marks.is_end(shown.token_ids[first : first + 1]).any() and shown.loss_mask[first]:
            kind = Flaw.MISSING_END_OF_TURN
        yield Spot(kind, before + first, before + first + 1, "other tokens than the chat template's render has")
        return
    if subject.loss_mask is None:
        return
    trained = np.concatenate([np.zeros(subject.prompt_length, np.bool_), subject.loss_mask > 0.0])
    learned = shown.loss_mask > 0.0
    for shift in (1, -1):
        if not np.array_equal(trained, learned) and np.array_equal(trained[1:-1], np.roll(learned, shift)[1:-1]):
            yield Spot(Flaw.SHIFTED_MASK, 0, subject.response_length, f"the weights are {abs(shift)} token off")
            return
    first_turn = int(np.argmax(learned))
    for run in runs_of(trained & ~learned):
        kind = Flaw.PROMPT_TRAINED if run.start < first_turn else Flaw.TOOL_TOKEN_TRAINED
        yield Spot(kind, before + run.start, before + run.end, "trained, and not said by the assistant")
    for run in runs_of(learned & ~trained):
        is_end = run.end - run.start == 1 and marks.is_end(ids[run.start : run.end]).any()
        if is_end:
            yield Spot(
                Flaw.MISSING_END_OF_TURN, before + run.start, before + run.end, "the end of the turn has no weight"
            )
