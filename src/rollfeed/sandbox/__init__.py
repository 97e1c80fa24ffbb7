"""Runs programs of models so that they can do no harm."""

from rollfeed.sandbox.choosing import OnDemandSandboxes, start_sandboxes
from rollfeed.sandbox.container import Container, ContainerSandboxes
from rollfeed.sandbox.local import LocalSandboxes

__all__ = ["Container", "ContainerSandboxes", "LocalSandboxes", "OnDemandSandboxes", "start_sandboxes"]
