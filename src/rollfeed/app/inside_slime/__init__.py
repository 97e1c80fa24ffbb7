"""Rollouts of ours in a process of slime's or miles's; docs/inside-slime.md says how."""

from rollfeed.app.inside_slime.slime_process import generate_rollout

__all__ = ["generate_rollout"]
