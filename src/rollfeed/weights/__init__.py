"""New policy weights: from a folder that a trainer outside fills, to servers, and the proof that they have arrived."""

from rollfeed.weights.bucket import WeightBucket
from rollfeed.weights.checkpoints import check_complete, version_of
from rollfeed.weights.directory import WeightDirectory
from rollfeed.weights.proof import Scores, compare
from rollfeed.weights.proving import EngineProof
from rollfeed.weights.publishing import Publisher
from rollfeed.weights.serving import ServingForm, served_tensors
from rollfeed.weights.transports import TRANSPORTS, DiskTransport
from rollfeed.weights.writing import write_checkpoint

__all__ = [
    "TRANSPORTS",
    "DiskTransport",
    "EngineProof",
    "Publisher",
    "Scores",
    "ServingForm",
    "WeightBucket",
    "WeightDirectory",
    "check_complete",
    "compare",
    "served_tensors",
    "version_of",
    "write_checkpoint",
]
