"""The settings of a run: one frozen tree, every value bounded."""

from rollfeed.config.advantage import AdvantageSettings
from rollfeed.config.engine import EngineSettings
from rollfeed.config.filters import FilterSettings, FiltersSettings
from rollfeed.config.load import load_settings, validate_settings
from rollfeed.config.model import ModelSettings
from rollfeed.config.plugins import PluginSettings
from rollfeed.config.prompts import DatasetSettings, EnvironmentSettings, PromptSettings
from rollfeed.config.reward import RewardSettings
from rollfeed.config.rollout import GroupFailurePolicy, Refill, RolloutSettings, SurplusPolicy
from rollfeed.config.rollout_config import RolloutConfig
from rollfeed.config.sampling import SamplingSettings
from rollfeed.config.settings import Settings

__all__ = [
    "AdvantageSettings",
    "DatasetSettings",
    "EngineSettings",
    "EnvironmentSettings",
    "FilterSettings",
    "FiltersSettings",
    "GroupFailurePolicy",
    "ModelSettings",
    "PluginSettings",
    "PromptSettings",
    "Refill",
    "RewardSettings",
    "RolloutConfig",
    "RolloutSettings",
    "SamplingSettings",
    "Settings",
    "SurplusPolicy",
    "load_settings",
    "validate_settings",
]
