"""The settings of a run: one frozen tree, every value bounded."""

from rollfeed.config.advantage import AdvantageSettings
from rollfeed.config.buffer import BufferPolicyName, BufferSettings
from rollfeed.config.engine import EngineSettings, Kernels, Precision, SGLangSettings, WeightUpdateMode, is_device
from rollfeed.config.evaluation import EvalDatasetSettings, EvalEnvironmentSettings, EvalKeys, EvalSettings
from rollfeed.config.filters import FilterSettings, FiltersSettings, OverSamplingSettings
from rollfeed.config.load import chosen_keys, load_scoring_settings, load_settings, validate_settings
from rollfeed.config.model import ModelSettings, TinyModelSettings
from rollfeed.config.openai_engine import OpenAISettings, Purpose
from rollfeed.config.placement import PlacementSettings
from rollfeed.config.plugins import PluginSettings
from rollfeed.config.prompts import DatasetSettings, EnvironmentSettings, PromptSettings
from rollfeed.config.reward import (
    CodeRewardSettings,
    RemoteForm,
    RemoteRewardSettings,
    RewardSettings,
    ScoringSettings,
    WorkerSettings,
)
from rollfeed.config.rollout import (
    GroupFailurePolicy,
    Refill,
    RefillCounts,
    RolloutMode,
    RolloutSettings,
    StalenessPolicy,
    SurplusPolicy,
)
from rollfeed.config.rollout_config import RolloutConfig
from rollfeed.config.sampling import SamplingSettings
from rollfeed.config.settings import Settings
from rollfeed.config.stored import read_stored, stored_identity, stored_values
from rollfeed.config.train import WarmUpSettings
from rollfeed.config.weights import ProofSettings, WeightSettings, WeightSource

__all__ = [
    "AdvantageSettings",
    "BufferPolicyName",
    "BufferSettings",
    "CodeRewardSettings",
    "DatasetSettings",
    "EngineSettings",
    "EnvironmentSettings",
    "EvalDatasetSettings",
    "EvalEnvironmentSettings",
    "EvalKeys",
    "EvalSettings",
    "FilterSettings",
    "FiltersSettings",
    "GroupFailurePolicy",
    "Kernels",
    "ModelSettings",
    "OpenAISettings",
    "OverSamplingSettings",
    "PlacementSettings",
    "PluginSettings",
    "Precision",
    "PromptSettings",
    "ProofSettings",
    "Purpose",
    "Refill",
    "RefillCounts",
    "RemoteForm",
    "RemoteRewardSettings",
    "RewardSettings",
    "RolloutConfig",
    "RolloutMode",
    "RolloutSettings",
    "SGLangSettings",
    "SamplingSettings",
    "ScoringSettings",
    "Settings",
    "StalenessPolicy",
    "SurplusPolicy",
    "TinyModelSettings",
    "WarmUpSettings",
    "WeightSettings",
    "WeightSource",
    "WeightUpdateMode",
    "WorkerSettings",
    "chosen_keys",
    "is_device",
    "load_scoring_settings",
    "load_settings",
    "read_stored",
    "stored_identity",
    "stored_values",
    "validate_settings",
]
