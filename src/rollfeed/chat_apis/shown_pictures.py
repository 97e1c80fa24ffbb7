"""Pictures that clients show in their messages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rollfeed.chat_apis.api_error import ApiError
from rollfeed.conversations.picture_places import with_parts
from rollfeed.errors import ConfigError
from rollfeed.protocols import PictureInput
from rollfeed.types import Message, Picture
from rollfeed.types.text import text_of

_HASH = "picture"
"""Key of a part of which the picture is kept: its hash."""


def hashes_in(message: Message) -> list[str]:
    """Return the hashes of the pictures of a message that was loaded."""
    content = message.get("content")
    return [part[_HASH] for part in content if _HASH in part] if isinstance(content, list) else []


def text_with_hashes(message: Message) -> str:
    """Return the content of a message that was loaded, each picture as its hash."""
    content = message.get("content")
    if not isinstance(content, list):
        return text_of(content)
    return "".join(part.get(_HASH) or text_of([part]) for part in content)


async def load_pictures(
    messages: Sequence[Message], seeing: PictureInput | None
) -> tuple[tuple[Message, ...], tuple[Picture, ...]]:
    """Return messages whose pictures are in the store, named by their hashes, and these pictures in their order.

    Raises:
        ApiError: If one cannot be loaded, or the model takes none.
    """
    if all(isinstance(message.get("content"), str) for message in messages):
        return tuple(messages), ()
    pictures: list[Picture] = []

    def loaded(part: Any) -> Any:
        if part["type"] != "image" or _HASH in part:
            return part
        if seeing is None or seeing.pictures is None:
            raise ApiError("there is a picture in the messages, and the model that is served takes text only")
        try:
            pictures.append(seeing.loader.load(part["image"]))
        except (ValueError, ConfigError) as error:
            raise ApiError(str(error)) from error
        return {"type": "image", _HASH: pictures[-1].content_hash}

    def load() -> tuple[Message, ...]:
        return tuple(with_parts(message, loaded) for message in messages)

    return await asyncio.to_thread(load), tuple(pictures)
