"""SGLang servers, alone or behind a router, as one engine."""

from rollfeed.engine.sglang.counters import Counters
from rollfeed.engine.sglang.engine import SGLangEngine

__all__ = ["Counters", "SGLangEngine"]
