"""Pictures of noise, and what tampers with them on the way to a server."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web
from PIL import Image

from rollfeed.config import TinyModelSettings
from rollfeed.types import SamplingParams

SETTINGS = TinyModelSettings(words=["red", "green"], num_heads=2)
PARAMS = SamplingParams(max_new_tokens=3, seed=1)
FAST: dict[str, Any] = {"startup_timeout_seconds": 60.0, "request_timeout_seconds": 60.0}


def png(seed: int, size: tuple[int, int] = (8, 6)) -> bytes:
    """Noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def uri(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


class Tampering:
    """Stands in front of a server, changes bodies of ``.../generate`` and replies, and keeps what it was sent."""

    def __init__(self, address: str) -> None:
        self.server = address
        self.change: Callable[[dict[str, Any]], None] = lambda body: None
        self.change_reply: Callable[[dict[str, Any]], None] = lambda reply: None
        self.bodies: list[dict[str, Any]] = []
        self.address = ""
        self.arrived, self.goes_on = asyncio.Event(), asyncio.Event()
        self.goes_on.set()

    async def handle(self, request: web.Request) -> web.Response:
        content = await request.read()
        is_generate = request.path.endswith("/generate")
        if is_generate:
            body = json.loads(content)
            self.bodies.append(json.loads(content))
            self.arrived.set()
            await self.goes_on.wait()
            self.change(body)
            content = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, self.server + request.path_qs, data=content, headers=headers) as reply,
        ):
            told = await reply.read()
            if is_generate and reply.status == 200 and reply.content_type == "application/json":
                changed = json.loads(told)
                self.change_reply(changed)
                told = json.dumps(changed).encode()
            return web.Response(body=told, status=reply.status, content_type=reply.content_type)
