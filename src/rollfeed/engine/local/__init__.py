"""The embedded engine: a causal language model inside this process. Needs torch."""

from rollfeed.engine.cores import wait_without_spinning

wait_without_spinning()  # before the first import of torch

from rollfeed.engine.local.embedded import EmbeddedEngine, create_local_engine  # noqa: E402

__all__ = ["EmbeddedEngine", "create_local_engine"]
