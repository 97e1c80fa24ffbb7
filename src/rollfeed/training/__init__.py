"""From batches to new weights.

What is here needs no PyTorch; the trainer (:mod:`rollfeed.training.trainer`) and the losses
(:mod:`rollfeed.training.losses`) do, and are imported from where they are.
"""

from rollfeed.training.packing import MicroBatch, pack_sequences
from rollfeed.training.sequences import TrainSequence, sequence_weights, split_into_minibatches, token_weights

__all__ = [
    "MicroBatch",
    "TrainSequence",
    "pack_sequences",
    "sequence_weights",
    "split_into_minibatches",
    "token_weights",
]
