"""``[metrics]``: where the numbers of a run that goes on can be asked for."""

from __future__ import annotations

from pydantic import Field

from rollfeed.config.section import Resume, Section


class MetricsSettings(Section, resume=Resume.FREE):
    """An endpoint for Prometheus, while `run` and `train` go on; see [metrics.md](metrics.md#prometheus)."""

    port: int | None = Field(default=None, ge=0, le=65535)
    """Serve `/metrics` on this port; 0 takes a free one, and tells which. Nothing is served without it."""
    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on; who reaches it sees the numbers. `0.0.0.0` for all of this machine."""
