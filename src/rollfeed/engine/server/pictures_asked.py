"""Pictures of requests to the embedded server."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfeed.base.sglang_wire import RequestError
from rollfeed.engine.server.parsing import token_array
from rollfeed.engine.server.service import Service
from rollfeed.protocols import PictureProcessor
from rollfeed.types import Picture


async def with_pictures(body: Any, service: Service) -> tuple[Picture, ...]:
    """Return the pictures of a body of ``/generate``, whose prompt then has the tokens of each.

    Raises:
        RequestError: If the model takes none, one cannot be loaded, or the prompt has not a placeholder for each.
    """
    given = body.pop("image_data", None) if isinstance(body, dict) else None
    if given in (None, [], ""):
        return ()
    seeing = service.picture_input
    if seeing is None or seeing.pictures is None:
        raise RequestError("image_data is not supported: the model takes text only")
    loader, processor = seeing.loader, seeing.pictures
    text, ids = body.get("text"), body.get("input_ids")
    if (ids is None and not isinstance(text, str)) or (isinstance(ids, list) and ids and isinstance(ids[0], list)):
        raise RequestError("image_data goes with one prompt a request, in text or input_ids")
    shown = given if isinstance(given, list) else [given]

    def look() -> tuple[tuple[Picture, ...], NDArray[np.int32]]:
        prompt_ids = service.tokenizer.encode(text, add_special_tokens=True) if ids is None else token_array(ids)
        try:
            pictures = tuple(loader.load(each) for each in shown)
            return pictures, expanded(prompt_ids, pictures, processor)
        except ValueError as error:
            raise RequestError(f"image_data: {error}") from None

    pictures, prompt_ids = await asyncio.to_thread(look)
    body.pop("text", None)
    body["input_ids"] = prompt_ids.tolist()
    return pictures


def expanded(
    prompt_ids: NDArray[np.int32], pictures: tuple[Picture, ...], processor: PictureProcessor
) -> NDArray[np.int32]:
    """Return a prompt with the tokens of its pictures; it may have them already. Raises ValueError if they do not fit.

    What is gone on from may have placeholders behind those of its pictures, which a policy has sampled.
    """
    try:
        processor.locate(prompt_ids, pictures)
    except ValueError:
        return processor.expand(prompt_ids, pictures, is_prompt=False)
    return prompt_ids
