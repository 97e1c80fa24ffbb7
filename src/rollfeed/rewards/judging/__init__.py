"""Judges: models behind chat endpoints that score responses by a rubric."""

from rollfeed.rewards.judging.counts import JudgeCounts
from rollfeed.rewards.judging.judge import Judge
from rollfeed.rewards.judging.judges import Judges
from rollfeed.rewards.judging.panel import Panel

__all__ = ["Judge", "JudgeCounts", "Judges", "Panel"]
