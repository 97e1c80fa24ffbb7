"""Inference engines, and how a model's name becomes a folder on this machine."""

from rollfeed.engine.checkpoint import DEFAULT_MODEL, check_checkpoint, resolve_checkpoint

__all__ = ["DEFAULT_MODEL", "check_checkpoint", "resolve_checkpoint"]
