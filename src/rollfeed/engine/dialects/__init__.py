"""Kinds of servers, by the name of their table under ``[engine]``; another one is a folder here and a line below."""

from collections.abc import Callable, Mapping
from typing import Any

from rollfeed.engine.client import Dialect
from rollfeed.engine.dialects.sglang import SGLang
from rollfeed.engine.dialects.vllm import VLLM

DIALECTS: Mapping[str, Callable[[Any], Dialect]] = {"sglang": SGLang, "openai": VLLM}
"""Each takes the settings of its table."""

__all__ = ["DIALECTS", "VLLM", "SGLang"]
