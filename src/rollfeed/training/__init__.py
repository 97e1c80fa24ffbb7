"""From batches to new weights.

What is here needs no PyTorch; the trainer (:mod:`rollfeed.training.trainer`) and the losses
(:mod:`rollfeed.training.losses`) do, and are imported from where they are.
"""

from rollfeed.training.advantages import (
    batch_advantages,
    group_mean_advantages,
    leave_one_out_advantages,
    reinforce_pp_advantages,
)
from rollfeed.training.normalisation import token_weights
from rollfeed.training.packing import MicroBatch, pack_sequences
from rollfeed.training.sequences import TrainSequence, sequence_weights, split_into_minibatches

__all__ = [
    "MicroBatch",
    "TrainSequence",
    "batch_advantages",
    "group_mean_advantages",
    "leave_one_out_advantages",
    "pack_sequences",
    "reinforce_pp_advantages",
    "sequence_weights",
    "split_into_minibatches",
    "token_weights",
]
