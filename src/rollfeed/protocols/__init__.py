"""The protocols: what the parts ask of each other, and where users plug in.

Parts never import each other; each is handed objects that fit a protocol from here, and ``app``
does the handing. The protocols a user may implement (named in ``[plugins]`` of a settings file, or
passed to ``RolloutConfig``) are marked *extension point*; docs/extending.md has an example of each.
"""

from rollfeed.protocols.agents import AgentFn, AgentTask, Matching
from rollfeed.protocols.difficulty import DifficultyPolicy, LevelOutcome
from rollfeed.protocols.episodes import (
    ENDED_BY,
    MULTI_TURN,
    OWN_CONTEXT,
    REWRITTEN_TURNS,
    STOPPED_AT,
    EnvironmentStep,
    MultiTurnEnvironment,
    RewrittenTurns,
    ServedEnvironment,
)
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
from rollfeed.protocols.generate import Environments, GenerateFn, RolloutRequest, SampleHook, Services, TurnJournal
from rollfeed.protocols.prompts import (
    AnswerMarker,
    HasMetrics,
    Learner,
    PromptPreprocessor,
    PromptRenderer,
    PromptSource,
    Rendered,
    Tokenizer,
)
from rollfeed.protocols.rewards import BatchedRewardFn, Grader, GroupRewardFn, RewardFn, Scorer
from rollfeed.protocols.rollouts import (
    AdvantageFn,
    Engine,
    Environment,
    GroupFilter,
    RolloutObserver,
    Task,
    TokenEndpoint,
    Tracker,
)
from rollfeed.protocols.steps import (
    AgeRule,
    BatchCutter,
    BatchFilter,
    BufferPolicy,
    PromptBuffer,
    RolloutContext,
    RolloutFn,
    RunningGroup,
)
from rollfeed.protocols.supply import CheckpointSource, Command, ServerUpdate, WeightPublisher, WeightTransport
from rollfeed.protocols.tools import CallFormat, Tool, ToolAnswer, Toolbox, ToolFailure

__all__ = [
    "ENDED_BY",
    "MULTI_TURN",
    "OWN_CONTEXT",
    "REWRITTEN_TURNS",
    "STOPPED_AT",
    "AdvantageFn",
    "AgeRule",
    "AgentFn",
    "AgentTask",
    "AnswerMarker",
    "BatchCutter",
    "BatchFilter",
    "BatchedRewardFn",
    "BufferPolicy",
    "CallFormat",
    "CheckpointSource",
    "Command",
    "DifficultyPolicy",
    "Engine",
    "Environment",
    "EnvironmentStep",
    "Environments",
    "ExecLimits",
    "ExecOutcome",
    "ExecResult",
    "GenerateFn",
    "Grader",
    "GroupFilter",
    "GroupRewardFn",
    "HasMetrics",
    "Isolation",
    "IsolationLevel",
    "Learner",
    "LevelOutcome",
    "Matching",
    "MultiTurnEnvironment",
    "PromptBuffer",
    "PromptPreprocessor",
    "PromptRenderer",
    "PromptSource",
    "Rendered",
    "RewardFn",
    "RewrittenTurns",
    "RolloutContext",
    "RolloutFn",
    "RolloutObserver",
    "RolloutRequest",
    "RunningGroup",
    "SampleHook",
    "Sandbox",
    "SandboxProvider",
    "Scorer",
    "ServedEnvironment",
    "ServerUpdate",
    "Services",
    "Task",
    "TokenEndpoint",
    "Tokenizer",
    "Tool",
    "ToolAnswer",
    "ToolFailure",
    "Toolbox",
    "Tracker",
    "TurnJournal",
    "WeightPublisher",
    "WeightTransport",
    "Workers",
]
