"""Plug-ins that are written for slime, or for miles, run unchanged; docs/slime-plugins.md says how."""

from rollfeed.compat.slime_plugins.placing import slime_run, with_slime_plugins
from rollfeed.compat.slime_plugins.shared_run import SlimeRun

__all__ = ["SlimeRun", "slime_run", "with_slime_plugins"]
