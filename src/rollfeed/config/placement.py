"""``[placement]``: which prompts start first, by what earlier answers were like."""

from __future__ import annotations

from rollfeed.config.section import Section


class PlacementSettings(Section):
    """The order of prompts by the lengths that their answers had before."""

    long_first: bool = False
    """Of the prompts submitted together, start those first whose answers were longest."""
    tail_batching: bool = False
    """Collect prompts with long answers, and answer them in a round of their own."""
