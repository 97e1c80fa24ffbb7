"""The settings of a run: one frozen tree, every value bounded."""

from rollfeed.config.advantage import AdvantageSettings
from rollfeed.config.engine import EngineSettings, Kernels, Precision, SGLangSettings, WeightUpdateMode, is_device
from rollfeed.config.filters import FilterSettings, FiltersSettings
from rollfeed.config.load import load_settings, validate_settings
from rollfeed.config.model import ModelSettings
from rollfeed.config.openai_engine import OpenAISettings, Purpose
from rollfeed.config.plugins import PluginSettings
from rollfeed.config.prompts import DatasetSettings, EnvironmentSettings, PromptSettings
from rollfeed.config.reward import (
    CodeRewardSettings,
    RemoteForm,
    RemoteRewardSettings,
    RewardSettings,
    WorkerSettings,
)
from rollfeed.config.rollout import GroupFailurePolicy, Refill, RolloutSettings, SurplusPolicy
from rollfeed.config.rollout_config import RolloutConfig
from rollfeed.config.sampling import SamplingSettings
from rollfeed.config.settings import Settings

__all__ = [
    "AdvantageSettings",
    "CodeRewardSettings",
    "DatasetSettings",
    "EngineSettings",
    "EnvironmentSettings",
    "FilterSettings",
    "FiltersSettings",
    "GroupFailurePolicy",
    "Kernels",
    "ModelSettings",
    "OpenAISettings",
    "PluginSettings",
    "Precision",
    "PromptSettings",
    "Purpose",
    "Refill",
    "RemoteForm",
    "RemoteRewardSettings",
    "RewardSettings",
    "RolloutConfig",
    "RolloutSettings",
    "SGLangSettings",
    "SamplingSettings",
    "Settings",
    "SurplusPolicy",
    "WeightUpdateMode",
    "WorkerSettings",
    "is_device",
    "load_settings",
    "validate_settings",
]
