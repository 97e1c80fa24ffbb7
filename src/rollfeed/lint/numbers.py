"""Checks of a sample's numbers: lengths, weights, logprobs, versions, and where its prompt ends.

Axes: P prompt tokens, R response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollfeed.base.true_runs import runs_of
from rollfeed.lint.findings import Finding, Flaw
from rollfeed.lint.marks import Marks, text_around
from rollfeed.lint.subject import Subject
from rollfeed.protocols import Tokenizer
from rollfeed.types import SampleStatus

_LARGEST_LOGPROB, _LOWEST_LOGPROB = 1e-3, -1000.0
"""As what is taken from an engine."""
_MOST_SHIFT = 3


class Spot(NamedTuple):
    """A finding without its place: response tokens, counted from the beginning of the response."""

    kind: Flaw
    start: int
    end: int
    detail: str


def finding(subject: Subject, found: Spot, marks: Marks | None) -> Finding:
    """Return what was found with its place and the text around it."""
    start, end = (subject.prompt_length + place for place in found[1:3])
    text = text_around(subject.tokens, max(0, start), max(0, end), marks) if len(subject.tokens) else ""
    return Finding(kind=found.kind, place=subject.place, start=start, end=end, detail=found.detail, text=text)


def check_shape(subject: Subject) -> Iterator[Spot]:
    """Yield why the arrays of a sample do not belong together; without any, the other checks may be made."""
    length = subject.response_length
    if not 0 <= length <= len(subject.tokens):
        yield Spot(Flaw.SHAPE, 0, 0, f"a response of {length} tokens in a sequence of {len(subject.tokens)}")
        return
    arrays = {
        "weights": subject.loss_mask,
        "logprobs": subject.logprobs,
        "logprobs of the teacher": subject.teacher_logprobs,
    }
    for name, values in arrays.items():
        if values is not None and len(values) != length:
            yield Spot(Flaw.SHAPE, 0, length, f"{len(values)} {name} for {length} response tokens")
    if subject.sampling_mask is not None:
        lengths, drawn_from = subject.sampling_mask
        if len(lengths) != length or int(lengths.sum()) != len(drawn_from):
            yield Spot(Flaw.SHAPE, 0, length, f"a sampling mask of {len(lengths)} tokens for {length}")


def check_numbers(subject: Subject, trained: NDArray[np.bool_]) -> Iterator[Spot]:
    """Yield weights out of 0 to 1, logprobs of trained tokens that are none, and tokens that were not drawn from."""
    mask = subject.loss_mask
    if mask is not None:
        for run in runs_of(~((mask >= 0.0) & (mask <= 1.0))):
            yield Spot(Flaw.WEIGHT, *run, f"weight {mask[run.start]:g}, out of 0 to 1")
    if subject.told is not None:
        for run in runs_of(trained & subject.told):
            yield Spot(Flaw.TOOL_TOKEN_TRAINED, *run, f"{run.end - run.start} tokens of others are trained")
    for whose, logprobs in (("", subject.logprobs), ("the teacher's ", subject.teacher_logprobs)):
        if logprobs is not None and not subject.is_taught:
            possible = (logprobs >= _LOWEST_LOGPROB) & (logprobs <= _LARGEST_LOGPROB)
            for run in runs_of(trained & ~possible):
                yield Spot(Flaw.IMPOSSIBLE_LOGPROB, *run, f"{whose}logprob {logprobs[run.start]:g} of a trained token")
    if subject.sampling_mask is not None:
        lengths, drawn_from = subject.sampling_mask
        positions = np.repeat(np.arange(len(lengths)), lengths)
        is_drawn = np.bincount(
            positions[drawn_from == subject.response_ids[positions]], minlength=subject.response_length
        )
        for run in runs_of(trained & (lengths > 0) & (is_drawn == 0)):
            yield Spot(Flaw.RETOKENISED_TURN, *run, "not among the tokens that it was drawn from")
    if subject.status in (SampleStatus.ABORTED, SampleStatus.FAILED) and trained.any():
        yield Spot(Flaw.UNFINISHED_TRAINED, 0, subject.response_length, f"status {subject.status.value}, and trained")


def check_prompt(
    subject: Subject, trained: NDArray[np.bool_], marks: Marks | None, *, tokenised: Callable[[str, bytes], bool] | None
) -> Iterator[Spot]:
    """Yield where a sample does not begin with its prompt, once, or has a weight there.

    ``trained`` says which of its tokens have weight, ``(R,)``; ``tokenised`` whether a text has ids, as
    :func:`is_tokenised` tells. That and ``marks`` are None without a tokenizer.
    """
    ids, before = subject.tokens, -subject.prompt_length
    prompt = subject.prompt
    begins_with_picture = prompt is not None and bool(prompt.images) and np.array_equal(ids[:2], prompt.token_ids[:2])
    if marks is not None and not begins_with_picture and marks.begins_twice(ids):
        yield Spot(Flaw.DOUBLED_BOS, before, before + 2, f"begins with {marks.decode(ids[:1])!r} twice")
        return
    if prompt is None or subject.has_own_context or subject.is_taught:
        return
    num_prompt, overlap = len(prompt.token_ids), len(prompt.token_ids) - subject.prompt_length
    if not np.array_equal(ids[:num_prompt], prompt.token_ids):
        common = min(num_prompt, len(ids))
        differing = np.flatnonzero(ids[:common] != prompt.token_ids[:common])
        first = int(differing[0]) if len(differing) else common
        yield Spot(Flaw.PROMPT_TOKENS, before + first, before + first + 1, "other tokens than the prompt has")
    elif overlap > 0 and trained[:overlap].any():
        yield Spot(Flaw.PROMPT_TRAINED, 0, overlap, f"{overlap} tokens of the prompt are in the response, with weight")
    elif tokenised is not None and not prompt.images and not tokenised(prompt.text, prompt.token_ids.tobytes()):
        yield Spot(Flaw.PROMPT_TOKENS, before, 0, "the prompt's tokens are not what its text is tokenised to")


def check_versions(subject: Subject, trained: NDArray[np.bool_]) -> Iterator[Spot]:
    """Yield response tokens whose policy version is not told, or cannot be right."""
    length, newest = subject.response_length, subject.newest_version
    if subject.spans is None:
        for turn, (older, newer) in enumerate(zip(subject.versions, subject.versions[1:], strict=False)):
            if newer < older:
                yield Spot(Flaw.VERSION_GAP, 0, length, f"turn {turn + 1} is of version {newer}, behind {older}")
        return
    position, last = 0, None
    for start, end, version in subject.spans:
        if start != position or end <= start:
            first, behind = sorted((start, position))
            yield Spot(Flaw.VERSION_GAP, first, behind, f"not one version from {first} to {behind}")
        if last is not None and version < last:
            yield Spot(Flaw.VERSION_GAP, start, end, f"version {version} behind {last}")
        if newest is not None and version > newest:
            yield Spot(Flaw.VERSION_GAP, start, end, f"version {version}, {newest} was the newest")
        is_old = newest is not None and subject.max_staleness is not None and version < newest - subject.max_staleness
        if is_old and trained[start:end].any():
            detail = f"version {version} is trained at {newest}, more than max_staleness behind"
            yield Spot(Flaw.VERSION_GAP, start, end, detail)
        position, last = end, version
    if position != length:
        first, behind = sorted((position, length))
        yield Spot(Flaw.VERSION_GAP, first, behind, f"versions of {position} tokens for {length}")


def shift_of(trained: NDArray[np.bool_], with_logprob: NDArray[np.bool_], boundaries: set[int]) -> int:
    """Return by how many tokens weights lie behind logprobs; 0 where they lie on each other.

    Args:
        trained: Which tokens have weight. ``(R,)``.
        with_logprob: Which have a logprob other than 0.0; a sampled token of probability 1 has none.
        boundaries: Where a policy version begins, from which on a sample may be trained.
    """
    extra, lost = trained & ~with_logprob, with_logprob & ~trained
    if not lost.any() or not trained.any():
        return 0
    by_shift = {shift: _shifted(with_logprob, shift) for shift in range(-_MOST_SHIFT, _MOST_SHIFT + 1) if shift}
    if extra.any():
        differing = {shift: int((trained != moved).sum()) for shift, moved in by_shift.items()}
        best = min(differing, key=lambda shift: (differing[shift], abs(shift)))
        return best if differing[best] < int((extra | lost).sum()) else 0
    # A shift whose other end lies outside the response.
    fitting = [shift for shift, moved in by_shift.items() if np.array_equal(trained, with_logprob & moved)]
    return min((shift for shift in fitting if shift not in boundaries), key=abs, default=0)


def _shifted(flags: NDArray[np.bool_], shift: int) -> NDArray[np.bool_]:
    moved = np.zeros_like(flags)
    if abs(shift) < len(flags):
        if shift > 0:
            moved[shift:] = flags[:-shift]
        else:
            moved[:shift] = flags[-shift:]
    return moved


def is_tokenised(tokenizer: Tokenizer, text: str, token_ids: bytes) -> bool:
    """Whether a text has these ids, with special tokens around it or without."""
    ids = np.frombuffer(token_ids, np.int32)
    return any(np.array_equal(tokenizer.encode(text, add_special_tokens=special), ids) for special in (False, True))
