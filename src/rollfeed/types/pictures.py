"""Pictures of prompts: what stands for one in records, and where it is among the tokens of a model."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from rollfeed.types.fields import Int32


class PictureKind(StrEnum):
    """The kinds of pictures."""

    IMAGE = "image"
    FRAME = "frame"
    """One of a video."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A reference to a picture, whose bytes a :class:`~rollfeed.protocols.PictureStore` has under its hash."""

    content_hash: str
    """SHA-256 of the bytes that are sent, in hexadecimal digits."""
    media_type: str
    """Of these bytes, such as ``image/png``."""
    width: Int32
    """In pixels."""
    height: Int32
    """In pixels."""
    kind: PictureKind = PictureKind.IMAGE
    source: str = ""
    """The path or URL that the data set gave, for people; ``data:`` where it was no more than the bytes."""

    @classmethod
    def from_text(cls, source: str) -> Picture:
        """Return what records of before stand for, which had the path or URL alone: bytes and size are not known."""
        return cls(content_hash="", media_type="", width=0, height=0, source=source)


class PlaceholderRange(NamedTuple):
    """Tokens ``start`` to ``end`` (exclusive) of a sequence stand for a picture."""

    start: Int32
    end: Int32


class SeenPicture(NamedTuple):
    """A picture that an engine says it has seen."""

    content_hash: str
    """Empty where it tells places only."""
    start: Int32
    """Its first token in what was sent."""
    end: Int32
    """The token behind its last one."""
