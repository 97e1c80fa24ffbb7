"""Servers that a run starts itself."""

from rollfeed.engine.launch.commands import KINDS, LaunchedModel, server_commands
from rollfeed.engine.launch.launched_engine import LaunchedEngine
from rollfeed.engine.launch.launching import ServerLauncher

__all__ = ["KINDS", "LaunchedEngine", "LaunchedModel", "ServerLauncher", "server_commands"]
