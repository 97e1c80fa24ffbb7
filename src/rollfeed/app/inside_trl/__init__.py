"""TRL's trainers with rollouts of ours, inside their process."""

from rollfeed.app.inside_trl.async_rollouts import AsyncRollouts
from rollfeed.app.inside_trl.rollout_function import RolloutFunc, rollout_func
from rollfeed.app.inside_trl.trl_rewards import rollout_reward

__all__ = ["AsyncRollouts", "RolloutFunc", "rollout_func", "rollout_reward"]
