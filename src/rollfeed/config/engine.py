"""``[engine]``: what the policy runs on."""

from __future__ import annotations

from pydantic import Field

from rollfeed.config.section import Section


class EngineSettings(Section):
    """The embedded engine: PyTorch inside this process."""

    threads: int = Field(default=0, ge=0, le=4096)
    """CPU threads; 0 takes the cores this process may use. Use 1 on a machine that is busy with other work."""
    num_slots: int = Field(default=32, ge=1, le=4096)
    """Responses decoded at once; keys and values for that many are held in memory."""
    context_length: int = Field(default=512, ge=8, le=10_000_000)
    """Tokens of prompt and response that one slot holds."""
