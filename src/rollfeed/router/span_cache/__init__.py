"""A cache between programs that speak text and servers that speak tokens; see :mod:`.span_cache`."""

from rollfeed.router.span_cache.span_cache import SpanCache, SpanCacheUse

__all__ = ["SpanCache", "SpanCacheUse"]
