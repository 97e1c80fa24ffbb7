"""What the parts ask of each other, and where users plug in.

Parts never import each other; each is handed objects that fit a protocol from here, and ``app``
does the handing. The protocols a user may implement (named in ``[plugins]`` of a settings file, or
passed to ``RolloutConfig``) are marked *extension point*; docs/extending.md has an example of each.
"""

from rollfeed.protocols.buffer import BufferPolicy, PromptBuffer
from rollfeed.protocols.execution import (
    ExecLimits,
    ExecOutcome,
    ExecResult,
    Isolation,
    IsolationLevel,
    Sandbox,
    SandboxProvider,
    Workers,
)
from rollfeed.protocols.prompts import PromptRenderer, Tokenizer
from rollfeed.protocols.rewards import BatchedRewardFn, Grader, GroupRewardFn, RewardFn, Scorer
from rollfeed.protocols.rollouts import (
    AdvantageFn,
    Endpoint,
    Engine,
    Environment,
    GenerateFn,
    GroupFilter,
    PromptSource,
    RolloutObserver,
    RolloutRequest,
    SampleHook,
    Task,
    Tracker,
)
from rollfeed.protocols.steps import AgeRule, BatchCutter, BatchFilter, RolloutContext, RolloutFn, Running
from rollfeed.protocols.supply import LengthPredictor, WeightProof, WeightSource

__all__ = [
    "AdvantageFn",
    "AgeRule",
    "BatchCutter",
    "BatchFilter",
    "BatchedRewardFn",
    "BufferPolicy",
    "Endpoint",
    "Engine",
    "Environment",
    "ExecLimits",
    "ExecOutcome",
    "ExecResult",
    "GenerateFn",
    "Grader",
    "GroupFilter",
    "GroupRewardFn",
    "Isolation",
    "IsolationLevel",
    "LengthPredictor",
    "PromptBuffer",
    "PromptRenderer",
    "PromptSource",
    "RewardFn",
    "RolloutContext",
    "RolloutFn",
    "RolloutObserver",
    "RolloutRequest",
    "Running",
    "SampleHook",
    "Sandbox",
    "SandboxProvider",
    "Scorer",
    "Task",
    "Tokenizer",
    "Tracker",
    "WeightProof",
    "WeightSource",
    "Workers",
]
