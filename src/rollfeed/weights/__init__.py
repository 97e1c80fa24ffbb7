"""New policy weights: from a folder that a trainer outside fills, to servers, and the proof that they have arrived."""

from rollfeed.weights.checkpoints import PROBE_FILE, check_complete, read_probe, version_of
from rollfeed.weights.directory import Ignored, WeightDirectory
from rollfeed.weights.proof import Comparison, Scores, compare
from rollfeed.weights.proving import EngineProof
from rollfeed.weights.publishing import Publisher
from rollfeed.weights.transports import TRANSPORTS, DiskTransport
from rollfeed.weights.writing import write_checkpoint

__all__ = [
    "PROBE_FILE",
    "TRANSPORTS",
    "Comparison",
    "DiskTransport",
    "EngineProof",
    "Ignored",
    "Publisher",
    "Scores",
    "WeightDirectory",
    "check_complete",
    "compare",
    "read_probe",
    "version_of",
    "write_checkpoint",
]
