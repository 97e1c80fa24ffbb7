"""Inference engines, and how a model's name becomes a folder on this machine."""

from rollfeed.base.cores import wait_without_spinning
from rollfeed.engine.checkpoint import (
    DEFAULT_MODEL,
    TINY_MODEL,
    TINY_MOE_MODEL,
    TINY_VISION_MODEL,
    check_checkpoint,
    gguf_file_of,
    resolve_checkpoint,
)

# Here and not beside the engine, because a tokenizer is loaded before it and brings torch.
wait_without_spinning()

__all__ = [
    "DEFAULT_MODEL",
    "TINY_MODEL",
    "TINY_MOE_MODEL",
    "TINY_VISION_MODEL",
    "check_checkpoint",
    "gguf_file_of",
    "resolve_checkpoint",
]
