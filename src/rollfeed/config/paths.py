"""Paths as people write them."""

from __future__ import annotations

import os


def expand_path(path: str) -> str:
    """Return a path with ``~`` and environment variables replaced; what is not set stays as it is."""
    return os.path.expandvars(os.path.expanduser(path))
