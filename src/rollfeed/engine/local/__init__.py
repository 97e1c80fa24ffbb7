"""The embedded engine: a causal language model inside this process. Needs torch."""

import os

# OpenMP threads spin at the end of every parallel region by default. Two of them on two cores that anything else
# uses as well wait for each other most of the time: decoding falls to a tenth of its speed. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from rollfeed.engine.local.embedded import EmbeddedEngine, create_local_engine

__all__ = ["EmbeddedEngine", "create_local_engine"]
