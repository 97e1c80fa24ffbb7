"""Where new policy weights come from: a folder that a trainer outside puts checkpoints into."""

from rollfeed.weights.checkpoints import check_complete, version_of
from rollfeed.weights.directory import Ignored, WeightDirectory

__all__ = ["Ignored", "WeightDirectory", "check_complete", "version_of"]
