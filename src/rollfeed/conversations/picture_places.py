"""Puts the pictures of a question in their places: in its messages as parts, or in its text as the model's own mark."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rollfeed.protocols import PictureLoading
from rollfeed.types import Message, Picture
from rollfeed.types.text import text_of

_PLACES = re.compile("(<image>|<video>)")
IMAGE_TYPES = ("image", "image_url", "input_image")
_VIDEO_TYPES = ("video", "video_url", "input_video")
_HOLDERS = ("image", "image_url", "url", "path", "source", "data", "bytes", "video", "video_url")
_PART = {"type": "image"}


def needed(loader: PictureLoading | None) -> PictureLoading:
    """Return what loads pictures. Raises ValueError where nothing does."""
    if loader is None:
        raise ValueError("content may hold text only here, no pictures")
    return loader


def num_pictures(messages: Sequence[Message]) -> int:
    """Return how many parts of messages are pictures."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list | tuple) for part in content)
    return sum(isinstance(part, Mapping) and part.get("type") == "image" for part in parts)


def with_marks(content: Any, mark: str) -> str:
    """Return a content as one text, with a model's mark for each part that is a picture."""
    if not isinstance(content, list | tuple):
        return str(content)
    return "".join(mark if part == _PART else text_of([part]) for part in content)


def showing(messages: Sequence[Message], uris: Sequence[str]) -> tuple[Message, ...]:
    """Return messages whose parts that are pictures have these, in the form of OpenAI's chat completions."""
    waiting = iter(uris)

    def shown(part: Any) -> Any:
        return {"type": "image_url", "image_url": {"url": next(waiting)}} if part == _PART else part

    return tuple(with_parts(message, shown) for message in messages)


def with_parts(message: Message, change: Callable[[Any], Any]) -> Message:
    """Return a message with every part of its content changed; a content without parts stays as it is."""
    content = message.get("content")
    return {**message, "content": [change(part) for part in content]} if isinstance(content, list | tuple) else message


def joined_contents(*contents: Any) -> Any:
    """Return contents one behind the other: a text where all of them are, else their parts."""
    if all(isinstance(content, str) for content in contents):
        return "".join(contents)
    parts = ([{"type": "text", "text": each}] if isinstance(each, str) else each for each in contents)
    return [part for each in parts for part in each if part.get("text") != ""]


class Placing:
    """Hands out the pictures of a question, in order, wherever its content has a place for one.

    ``images`` and ``videos``, frames of each, came beside the content; ``load`` and ``load_video`` load what is in a
    part itself.
    """

    def __init__(
        self,
        images: Sequence[Picture],
        videos: Sequence[Sequence[Picture]],
        *,
        load: Callable[[Any], Picture],
        load_video: Callable[[Any], Sequence[Picture]],
    ) -> None:
        self._waiting: dict[str, list[tuple[Picture, ...]]] = {
            "image": [(image,) for image in images],
            "video": [tuple(frames) for frames in videos],
        }
        self._given = {kind: len(waiting) for kind, waiting in self._waiting.items()}
        self._num_places = {"image": 0, "video": 0}
        self._load, self._load_video = load, load_video
        self.pictures: list[Picture] = []
        """Those that have their places."""

    def in_messages(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return messages in which each picture is a part without content.

        Raises:
            ValueError: If there are more pictures than places, or fewer, or one cannot be loaded.
        """
        placed = tuple(self._placed(message) for message in messages)
        self._check()
        return placed

    def in_text(self, text: str, mark: str) -> str:
        """Return a text with a model's mark for each picture; raises as :meth:`in_messages`."""
        pieces = [piece if kind is None else mark * self._take(kind) for piece, kind in self._pieces(text)]
        self._check()
        return "".join(pieces)

    def _placed(self, message: Message) -> Message:
        content = message.get("content")
        if isinstance(content, str):
            pieces = list(self._pieces(content))
            if all(kind is None for _, kind in pieces):
                return message
            return {**message, "content": [part for piece in pieces for part in self._parts(*piece)]}
        parts = [content] if isinstance(content, Mapping) else content
        if not isinstance(parts, list | tuple):
            return message
        return {**message, "content": [placed for part in parts for placed in self._part(part)]}

    def _part(self, part: Any) -> Iterator[Any]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if kind in ("text", None) and isinstance(part, Mapping) else part
        if isinstance(text, str):
            for piece in self._pieces(text):
                yield from self._parts(*piece)
            return
        is_video = kind in _VIDEO_TYPES
        names = part if kind is None and isinstance(part, Mapping) else ()
        if not (is_video or kind in IMAGE_TYPES or any(name in names for name in IMAGE_TYPES)):
            yield part
        elif not any(part.get(name) is not None for name in _HOLDERS):
            yield from [_PART] * self._take("video" if is_video else "image")
        else:
            shown = self._load_video(part) if is_video else (self._load(part),)
            self.pictures += shown
            yield from [_PART] * len(shown)

    def _parts(self, piece: str, kind: str | None) -> list[dict[str, Any]]:
        return [{"type": "text", "text": piece}] if kind is None else [_PART] * self._take(kind)

    def _pieces(self, text: str) -> Iterator[tuple[str, str | None]]:
        """Yield the pieces of a text, and the kind of what has its place there; None for text."""
        for piece in _PLACES.split(text):
            kind = piece[1:-1]
            if piece and piece[:1] + piece[-1:] == "<>" and self._given.get(kind):
                yield piece, kind
            elif piece:
                yield piece, None

    def _take(self, kind: str) -> int:
        """Give the next picture or video its place, and return how many pictures it is."""
        self._num_places[kind] += 1
        if not self._waiting[kind]:
            return 0
        shown = self._waiting[kind].pop(0)
        self.pictures += shown
        return len(shown)

    def _check(self) -> None:
        for kind, given in self._given.items():
            places = self._num_places[kind]
            if places != given:
                raise ValueError(
                    f"{given} {kind}s and {places} places for them: write <{kind}> once for each, or parts "
                    f"{{'type': '{kind}'}}"
                )
