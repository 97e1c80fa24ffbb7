"""Turns of sessions in the form in which journals keep them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rollfeed.conversations import TurnPlace
from rollfeed.gateway.turn_tree import Turn
from rollfeed.types import Picture, Replied

_PLAIN = ("goes_on", "told", "follows", "num_messages", "message", "about")
_DIGESTS = ("history", "digest", "alone")
"""Fields of a turn that are kept as they are, and as texts."""


def record_of(turn: Turn) -> Replied:
    """Return what a journal keeps of a turn."""
    place = turn.place
    about = {
        **{name: getattr(turn, name) for name in _PLAIN},
        "place": {
            "messages": place.messages,
            "text": place.text,
            "kinds": sorted(place.kinds),
            "num_turns": place.num_turns,
            "is_settled": place.is_settled,
            "is_compared": place.is_compared,
            "follows": place.before is not None,
        },
        **{name: getattr(turn, name).hex() for name in _DIGESTS},
        **({"images": msgspec.to_builtins(turn.images)} if turn.images else {}),
    }
    parent = None if turn.parent is None else turn.parent.number
    return Replied(turn.number, parent, turn.context, turn.completion, about)


def turn_of(record: Replied, turns: Mapping[int, Turn]) -> Turn | None:
    """Return the turn that a journal has kept; None where its parent is not among ``turns``, by number."""
    parent = None if record.parent is None else turns.get(record.parent)
    if record.parent is not None and parent is None:
        return None
    about: Mapping[str, Any] = record.about
    kept = dict(about["place"])
    before = parent.place if kept.pop("follows") and parent is not None else None
    place = TurnPlace(before, **{**kept, "messages": tuple(kept["messages"]), "kinds": frozenset(kept["kinds"])})
    fields = {name: about[name] for name in _PLAIN} | {name: bytes.fromhex(about[name]) for name in _DIGESTS}
    return Turn(
        number=record.number,
        parent=parent,
        context=record.context,
        place=place,
        completion=record.completion,
        images=msgspec.convert(about.get("images", ()), tuple[Picture, ...]),
        **fields,
    )
