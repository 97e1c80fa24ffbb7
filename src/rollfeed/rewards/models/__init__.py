"""Reward models: what they are sent, where they compute, and rewards made of their logits."""

from rollfeed.rewards.models.scorer import RewardModelScorer, check_tokens

__all__ = ["RewardModelScorer", "check_tokens"]
