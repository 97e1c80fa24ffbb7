"""Runs programs of models so that they can do no harm."""

from rollfeed.sandbox.choosing import start_sandboxes
from rollfeed.sandbox.container import ContainerSandboxes
from rollfeed.sandbox.local import LocalSandboxes
from rollfeed.sandbox.on_demand import OnDemandSandboxes
from rollfeed.sandbox.snapshots import restore_snapshot, take_snapshot

__all__ = [
    "ContainerSandboxes",
    "LocalSandboxes",
    "OnDemandSandboxes",
    "restore_snapshot",
    "start_sandboxes",
    "take_snapshot",
]
