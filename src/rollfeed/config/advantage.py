"""``[advantage]``: how rewards become advantages."""

from __future__ import annotations

from rollfeed.config.section import Section


class AdvantageSettings(Section):
    """Group-relative advantages: reward minus the group's mean."""

    divide_by_std: bool = False
    """Divide by the group's standard deviation as GRPO does (arXiv:2402.03300); `false` is Dr. GRPO
    (arXiv:2503.20783).
    """
