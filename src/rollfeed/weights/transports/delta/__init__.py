"""Weights as deltas: what has changed since the version before, rebuilt on the servers' hosts."""

from rollfeed.weights.transports.delta.receiver import DeltaReceiver
from rollfeed.weights.transports.delta.store import CheckpointStore
from rollfeed.weights.transports.delta.transport import DeltaTransport

__all__ = ["CheckpointStore", "DeltaReceiver", "DeltaTransport"]
