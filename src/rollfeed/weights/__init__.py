"""New policy weights: a folder that a trainer outside fills, and the proof that an engine has what it was given."""

from rollfeed.weights.checkpoints import PROBE_FILE, check_complete, read_probe, version_of
from rollfeed.weights.directory import Ignored, WeightDirectory
from rollfeed.weights.proof import Comparison, Scores, compare
from rollfeed.weights.proving import EngineProof

__all__ = [
    "PROBE_FILE",
    "Comparison",
    "EngineProof",
    "Ignored",
    "Scores",
    "WeightDirectory",
    "check_complete",
    "compare",
    "read_probe",
    "version_of",
]
