"""Prompts that wait to be answered again or resumed, by policy and within bounded memory."""

from rollfeed.buffer.buffer import Buffer, Spill
from rollfeed.buffer.policies import built_in_policy, fifo, freshest, max_staleness, oldest_version

__all__ = ["Buffer", "Spill", "built_in_policy", "fifo", "freshest", "max_staleness", "oldest_version"]
