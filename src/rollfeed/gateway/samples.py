"""The samples of a session: each sampled token is trained in one of them, at the context that it was sampled in.

A sample is a path of turns, each of which follows the tokens of the one before. Where paths part, the first one has the
turns before in its response; to the others they are context.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from rollfeed.gateway.turn_tree import Turn
from rollfeed.protocols import STOPPED_AT, RolloutRequest
from rollfeed.sample_builder import STATUS_OF, SampleBuilder
from rollfeed.types import Picture, Sample


class Sifted(NamedTuple):
    """The turns of a session."""

    kept: list[Turn]
    dropped: list[Turn]
    """Other completions of a history, that nobody went on from."""


def sift(turns: Iterable[Turn]) -> Sifted:
    """Drop those completions of one history that no other history has, where one of them is in one; else, all but last.

    Args:
        turns: In the order in which they ended.
    """
    by_history: dict[bytes, list[Turn]] = {}
    for turn in turns:
        by_history.setdefault(turn.history, []).append(turn)
    kept, dropped = list[Turn](), list[Turn]()
    for siblings in by_history.values():
        chosen = [turn for turn in siblings if turn.num_followers] or siblings[-1:]
        kept += chosen
        dropped += [turn for turn in siblings if turn not in chosen]
    return Sifted(sorted(kept, key=_number), sorted(dropped, key=_number))


def samples_of(turns: Sequence[Turn], request: RolloutRequest, metadata: Mapping[str, Any]) -> list[Sample]:
    """Return the samples of turns; the last one ends with the last of them.

    Turns are as :func:`sift` keeps them. A sample that does not begin with the request's prompt says so in its
    metadata; ``metadata`` goes into all, besides the prompt's.
    """
    followed = {id(turn.token_parent) for turn in turns}
    trained = set[int]()
    samples = []
    for last in turns:
        if id(last) in followed:
            continue
        path = [last]
        while (before := path[-1].token_parent) is not None and id(before) not in trained:
            path.append(before)
        trained |= {id(turn) for turn in path}
        samples.append(_sample(path[::-1], request, metadata))
    return samples


def _sample(path: Sequence[Turn], request: RolloutRequest, metadata: Mapping[str, Any]) -> Sample:
    context_ids = path[0].context_ids()
    images, asked = path[0].context_images(), request.prompt
    is_prompt = np.array_equal(context_ids, asked.token_ids) and _hashes(images) == _hashes(asked.images)
    builder = SampleBuilder(
        replace(request, partial=None), context_ids=None if is_prompt else context_ids, context_images=images
    )
    version = 0
    for place, turn in enumerate(path):
        if place:
            builder.append_inserted(turn.context, policy_version=version, images=turn.images)
        builder.append_completion(turn.completion)
        if turn.completion.version_spans:
            version = turn.completion.version_spans[-1].policy_version
    last = path[-1].completion
    sample = builder.build(STATUS_OF[last.finish_reason.kind], response=last.text)
    stop = last.finish_reason.matched
    stopped = {STOPPED_AT: stop} if isinstance(stop, str) else {}
    return replace(sample, metadata={**sample.metadata, **metadata, **stopped})


def _hashes(images: Iterable[Picture]) -> list[str]:
    return [picture.content_hash for picture in images]


def _number(turn: Turn) -> int:
    return turn.number
