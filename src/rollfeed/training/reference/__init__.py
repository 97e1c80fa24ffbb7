"""The policy that a trained one is kept near to, by its loss or by its rewards."""

from rollfeed.training.reference.held import HeldReference
from rollfeed.training.reference.reward_kl import LessKL, Minibatches, RewardKL

__all__ = ["HeldReference", "LessKL", "Minibatches", "RewardKL"]
