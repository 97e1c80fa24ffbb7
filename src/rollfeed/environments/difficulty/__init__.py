"""Difficulty: which levels of environments problems are made at, by what becomes of the answers."""

from rollfeed.environments.difficulty.adapting import COLUMNS
from rollfeed.environments.difficulty.band import BandPolicy
from rollfeed.environments.difficulty.learning_progress import LearningProgressPolicy
from rollfeed.environments.difficulty.manager import DifficultyManager
from rollfeed.environments.difficulty.rlve import FixedPolicy, RlvePolicy

__all__ = ["COLUMNS", "BandPolicy", "DifficultyManager", "FixedPolicy", "LearningProgressPolicy", "RlvePolicy"]
