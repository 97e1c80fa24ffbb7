"""Where the user's cache is, for what is made once a machine."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache(kind: str) -> Path:
    """Return rollfeed's cache folder of one kind, which may not exist yet."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(configured) if configured.startswith("/") else Path.home() / ".cache"
    return base / "rollfeed" / kind
