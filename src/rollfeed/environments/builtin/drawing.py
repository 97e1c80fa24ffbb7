"""Pictures of problems, drawn from their seeds: the same bytes on every machine.

Axes: H rows and W columns of pixels, C = 3 colours: red, green, blue.
"""

from __future__ import annotations

import base64
import struct
import zlib
from random import Random

import numpy as np
from numpy.typing import NDArray

SIDE = 32
"""Pixels of a picture's rows and columns."""


def noisy(colour: tuple[int, int, int], random: Random, *, amount: int) -> NDArray[np.uint8]:
    """Return a picture of one colour, in a shade of its own, whose pixels differ by up to ``amount``, ``(H, W, C)``."""
    shade = np.array([channel + random.randint(-amount, amount) for channel in colour])
    noise = np.random.default_rng(random.getrandbits(64)).integers(-amount, amount + 1, (SIDE, SIDE, 3))
    return np.clip(shade + noise, 0, 255).astype(np.uint8)


def data_uri(pixels_HWC: NDArray[np.uint8]) -> str:
    """Return a picture as a data URI, in PNG without compression, whose bytes no version of a library changes.

    Source: Portable Network Graphics, third edition (W3C), sections 5 and 7 to 11.
    """
    height, width, _ = pixels_HWC.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels_HWC.reshape(height, -1)], axis=1)
    content = b"\x89PNG\r\n\x1a\n" + b"".join(
        (
            _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
            _chunk(b"IDAT", zlib.compress(rows.tobytes(), level=0)),
            _chunk(b"IEND", b""),
        )
    )
    return "data:image/png;base64," + base64.b64encode(content).decode()


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
