"""The embedded engine: a causal language model inside this process. Needs torch."""

from rollfeed.engine.local.create import create_local_engine
from rollfeed.engine.local.embedded import EmbeddedEngine

__all__ = ["EmbeddedEngine", "create_local_engine"]
