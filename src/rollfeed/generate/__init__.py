"""From a prompt to samples."""

from rollfeed.generate.builder import SampleBuilder
from rollfeed.generate.single_turn import single_turn

__all__ = ["SampleBuilder", "single_turn"]
