"""The settings of a run: one frozen tree, every value bounded."""

from rollfeed.config.advantage import AdvantageSettings
from rollfeed.config.buffer import BufferPolicyName, BufferSettings, PlacementSettings
from rollfeed.config.cluster import ClusterKind, ClusterSettings
from rollfeed.config.engine import (
    EngineSettings,
    Kernels,
    Precision,
    SGLangSettings,
    is_device,
)
from rollfeed.config.evaluation import EvalDatasetSettings, EvalEnvironmentSettings, EvalKeys, EvalSettings
from rollfeed.config.filters import FilterSettings, FiltersSettings
from rollfeed.config.judge import JudgeSettings
from rollfeed.config.launch import LaunchSettings
from rollfeed.config.load import chosen_keys, load_scoring_settings, validate_settings
from rollfeed.config.model import TinyModelSettings
from rollfeed.config.plugins import PluginSettings
from rollfeed.config.prompts import (
    AdaptiveSettings,
    DatasetSettings,
    DifficultyPolicyName,
    EnvironmentSettings,
    PromptSettings,
)
from rollfeed.config.resuming import read_stored, stored_identity, stored_values
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
    RolloutMode,
    RolloutSettings,
    StalenessPolicy,
    SurplusPolicy,
)
from rollfeed.config.run_spec import RunSpec
from rollfeed.config.sampling import SamplingSettings
from rollfeed.config.settings import RolloutConfig, Settings
from rollfeed.config.tracking import TrackerName, TrackingSettings
from rollfeed.config.warm_up import WarmUpSettings
from rollfeed.config.weights import WeightSettings, WeightSource

__all__ = [
    "AdaptiveSettings",
    "AdvantageSettings",
    "BufferPolicyName",
    "BufferSettings",
    "ClusterKind",
    "ClusterSettings",
    "CodeRewardSettings",
    "DatasetSettings",
    "DifficultyPolicyName",
    "EngineSettings",
    "EnvironmentSettings",
    "EvalDatasetSettings",
    "EvalEnvironmentSettings",
    "EvalKeys",
    "EvalSettings",
    "FilterSettings",
    "FiltersSettings",
    "GroupFailurePolicy",
    "JudgeSettings",
    "Kernels",
    "LaunchSettings",
    "PlacementSettings",
    "PluginSettings",
    "Precision",
    "PromptSettings",
    "Refill",
    "RemoteForm",
    "RemoteRewardSettings",
    "RewardSettings",
    "RolloutConfig",
    "RolloutMode",
    "RolloutSettings",
    "RunSpec",
    "SGLangSettings",
    "SamplingSettings",
    "ScoringSettings",
    "Settings",
    "StalenessPolicy",
    "SurplusPolicy",
    "TinyModelSettings",
    "TrackerName",
    "TrackingSettings",
    "WarmUpSettings",
    "WeightSettings",
    "WeightSource",
    "WorkerSettings",
    "chosen_keys",
    "is_device",
    "load_scoring_settings",
    "read_stored",
    "stored_identity",
    "stored_values",
    "validate_settings",
]
