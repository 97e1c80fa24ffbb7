"""SGLang servers."""

from rollfeed.engine.dialects.sglang.sglang import SGLang

__all__ = ["SGLang"]
