"""The embedded engine: a causal language model inside this process. Needs torch."""

from rollfeed.engine.local.embedded import EmbeddedEngine, create_local_engine

__all__ = ["EmbeddedEngine", "create_local_engine"]
