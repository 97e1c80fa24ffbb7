"""The root of the settings tree, and the part of it that a rollout manager needs."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from rollfeed.config.advantage import AdvantageSettings
from rollfeed.config.agent import AgentSettings
from rollfeed.config.buffer import BufferSettings, PlacementSettings
from rollfeed.config.cluster import ClusterKind, ClusterSettings
from rollfeed.config.engine import EngineSettings
from rollfeed.config.evaluation import EvalSettings
from rollfeed.config.filters import FiltersSettings
from rollfeed.config.method import advantage_of, as_method
from rollfeed.config.metrics import MetricsSettings
from rollfeed.config.model import ModelSettings
from rollfeed.config.plugins import PluginSettings, import_path_of
from rollfeed.config.prompts import PromptSettings
from rollfeed.config.reward import RewardSettings
from rollfeed.config.rollout import RolloutMode, RolloutSettings
from rollfeed.config.sampling import SamplingSettings
from rollfeed.config.section import Resume, Section
from rollfeed.config.servers import ServerSettings
from rollfeed.config.teacher import TeacherSettings, TeacherUse
from rollfeed.config.tools import ToolSettings
from rollfeed.config.tracking import TrackingSettings
from rollfeed.config.train import (
    Correction,
    LossSettings,
    Objective,
    OldLogprobs,
    TrainKind,
    TrainSettings,
)
from rollfeed.config.weights import WeightSettings

_WITHOUT_SAMPLING: Mapping[str, Container[str]] = {
    "prompts": ("environments", "adaptive", "rollout_max_prompt_len"),
    "plugins": (
        *("prompt_source", "difficulty_policy", "generate", "rollout", "group_filters", "batch_filter", "advantage"),
    ),
    "filters": FiltersSettings.model_fields,
    "train": ("method", "warm_up", "routing_replay"),
    "train.loss": LossSettings.model_fields.keys()
    - {"objective", "normalisation", "constant_length", "router_aux_loss_coefficient"},
    "advantage": AdvantageSettings.model_fields,
    "teacher": TeacherSettings.model_fields,
    "placement": PlacementSettings.model_fields,
    "sampling": ("return_sampling_mask", "return_routed_experts"),
    "tools": ToolSettings.model_fields,
    "agent": AgentSettings.model_fields,
    "weights": ("source",),
}
"""Keys that have no effect with ``rollout.mode = "sft"``, by section."""


class RolloutConfig(Section):
    """All that ``rollfeed.open_rollouts`` needs to know: sections of a settings file, with functions in ``plugins``.

    ``RolloutConfig(rollout=RolloutSettings(rollout_batch_size=8), plugins=PluginSettings(reward=score))``
    """

    seed: Annotated[int, Resume.RANDOMNESS] = Field(default=0, ge=0, le=2**63 - 1)
    """Everything random in the run derives from it."""
    rollout: RolloutSettings = RolloutSettings()
    buffer: BufferSettings = BufferSettings()
    placement: PlacementSettings = PlacementSettings()
    sampling: SamplingSettings = SamplingSettings()
    weights: WeightSettings = WeightSettings()
    reward: RewardSettings = RewardSettings()
    filters: FiltersSettings = FiltersSettings()
    advantage: AdvantageSettings = AdvantageSettings()
    teacher: Annotated[TeacherSettings | None, Resume.REWARDS] = None
    tools: ToolSettings = ToolSettings()
    agent: AgentSettings = AgentSettings()
    plugins: PluginSettings = PluginSettings()

    @model_validator(mode="after")
    def _fits_together(self) -> RolloutConfig:
        for problem in self._problems():
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        plugins = self.plugins
        if self.agent.answers and plugins.generate:
            yield f"plugins.generate = {import_path_of(plugins.generate)!r} replaces [agent]: remove one of them"
        if self.rollout.mode is RolloutMode.SFT:
            yield from self._without_effect()
        if plugins.advantage and self.advantage != AdvantageSettings():
            yield f"plugins.advantage = {import_path_of(plugins.advantage)!r} replaces [advantage]: remove one of them"
        if self.teacher is not None:
            yield from self._teacher_problems(self.teacher)
        overlong = self.reward.overlong
        if overlong and overlong.cache > (limit := overlong.length or self.sampling.rollout_max_response_len):
            yield f"reward.overlong.cache = {overlong.cache} is above the {limit} tokens that it is part of: lower it"
        over_sampling = self.filters.over_sampling
        if plugins.batch_filter and over_sampling is not None and (over_sampling.name or over_sampling.parameters):
            yield "plugins.batch_filter replaces filters.over_sampling: remove one, or leave only num_extra there"
        if over_sampling is not None and not (over_sampling.name or plugins.batch_filter):
            yield "filters.over_sampling has no filter: set its name, or plugins.batch_filter"
        if self.num_extra_groups < 1 and (plugins.batch_filter or over_sampling is not None):
            yield (
                "the batch filter has nothing to choose from: set rollout.over_sampling_batch_size above "
                "rollout_batch_size, or filters.over_sampling.num_extra"
            )

    def _teacher_problems(self, teacher: TeacherSettings) -> Iterator[str]:
        sampling, plugins = self.sampling, self.plugins
        temperature = teacher.temperature or sampling.rollout_temperature
        if teacher.servers and temperature != 1.0:
            name = "teacher.temperature" if teacher.temperature else "sampling.rollout_temperature"
            yield (
                f"{name} = {temperature:g}: teacher.servers tell log-probabilities before any temperature: set "
                "teacher.temperature = 1, or name the teacher as teacher.checkpoint"
            )
        is_masked = sampling.return_sampling_mask
        if sampling.restrictions or is_masked:
            told = ", ".join(sampling.restrictions) or "sampling.return_sampling_mask = true"
            yield f"{told}: policy and teacher are compared over the whole vocabulary: remove it, or [teacher]"
        if teacher.use is TeacherUse.REWARD and plugins.has_reward:
            yield "teacher.use = 'reward' replaces the reward functions of [plugins]: remove one of them"
        if teacher.use is TeacherUse.LOSS and plugins.advantage and not teacher.advantage_weight:
            yield "plugins.advantage has no effect with teacher.advantage_weight = 0: raise that, or remove it"

    def _without_effect(self) -> Iterator[str]:
        for path, names in _WITHOUT_SAMPLING.items():
            section: Any = self
            for name in path.split("."):
                section = getattr(section, name, None)
            for name in () if section is None else section.changed_values():
                if name in names:
                    yield (
                        f"{path}.{name} has no effect with rollout.mode = 'sft', which learns the conversations of "
                        "data sets as they stand: remove it"
                    )

    @property
    def num_extra_groups(self) -> int:
        """Groups to have beyond the batch before a batch filter chooses it."""
        given = None if self.filters.over_sampling is None else self.filters.over_sampling.num_extra
        return given or self.rollout.first_submission - self.rollout.rollout_batch_size


class Settings(RolloutConfig):
    """A whole run, as one frozen tree."""

    model: ModelSettings = ModelSettings()
    prompts: PromptSettings = PromptSettings()
    engine: EngineSettings = EngineSettings()
    cluster: ClusterSettings = ClusterSettings()
    train: TrainSettings = TrainSettings()
    eval: EvalSettings = EvalSettings()
    metrics: MetricsSettings = MetricsSettings()
    tracking: TrackingSettings = TrackingSettings()

    @model_validator(mode="before")
    @classmethod
    def _advantage_of_method(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        values = _with_mode_of_kind(values)
        train, plugins, given = (values.get(name, {}) for name in ("train", "plugins", "advantage"))
        method = as_method(train.get("method") if isinstance(train, Mapping) else getattr(train, "method", None))
        own = plugins.get("advantage") if isinstance(plugins, Mapping) else getattr(plugins, "advantage", None)
        if method is None or own is not None or not isinstance(given, Mapping):
            return values
        return {**values, "advantage": advantage_of(method, given)}

    @model_validator(mode="after")
    def _loss_of_the_mode(self) -> Settings:
        loss, changed = self.train.loss, dict[str, Any]()
        if self.rollout.mode is RolloutMode.SFT:
            changed["objective"] = Objective.CROSS_ENTROPY
        elif "correction" not in loss.model_fields_set:
            is_stale = self.rollout.mode is not RolloutMode.SYNC
            is_comparable = not self.sampling.restrictions and loss.old_logprobs is OldLogprobs.TRAINER
            changed["correction"] = Correction.TRUNCATE if is_stale and is_comparable else Correction.NONE
        if changed:
            # The sections are frozen, and this one depends on others.
            train = self.train.model_copy(update={"loss": loss.model_copy(update=changed)})
            object.__setattr__(self, "train", train)
        return self

    def _problems(self) -> Iterator[str]:
        plugins, prompts = self.plugins, self.prompts
        if not (prompts.datasets or prompts.environment_ids or plugins.prompt_source or self.eval.has_sets):
            yield (
                "no prompts: add [[prompts.environments]], [prompts.adaptive], [[prompts.datasets]] or "
                "plugins.prompt_source"
            )
        if plugins.difficulty_policy and prompts.adaptive is None:
            yield "plugins.difficulty_policy: there is nothing whose difficulty adapts: add [prompts.adaptive]"
        if plugins.prompt_source and (prompts.datasets or prompts.environment_ids):
            yield "plugins.prompt_source replaces [prompts]: remove one of them"
        yield from super()._problems()
        yield from self._objective_problems()
        if self.train.kind is TrainKind.REWARD_MODEL:
            yield from self._reward_model_problems()
        elif self.rollout.mode is RolloutMode.SFT and self.rollout.n_samples_per_prompt != 1:
            yield "rollout.n_samples_per_prompt = 2: a conversation has one answer with mode = 'sft': remove it"
        if self.sampling.return_sampling_mask and self.engine.openai is not None:
            yield "sampling.return_sampling_mask: servers of [engine.openai] return none: set it to false"
        if self.train.routing_replay and not self.sampling.return_routed_experts:
            yield (
                "train.routing_replay = true trains with the experts that tokens were sampled with: set "
                "sampling.return_routed_experts = true, or it to false"
            )
        if self.engine.launch is not None and self.engine.launch.colocate and self.rollout.mode is RolloutMode.ASYNC:
            yield (
                "engine.launch.colocate: servers have no time to give up their memory with rollout.mode = 'async': set "
                "another mode, or colocate = false"
            )
        if self.train.export_best is not None and not self.eval.has_sets:
            yield "train.export_best goes by evaluations: add [[eval.datasets]] or [[eval.environments]], or remove it"
        yield from self._cluster_problems()
        if self.max_context_length > self.engine.context_length:
            yield (
                f"sampling.rollout_max_context_len = {self.max_context_length} is above engine.context_length = "
                f"{self.engine.context_length}: raise the latter"
            )
        if self.rollout.mode is RolloutMode.SFT:
            if any(dataset.image_key or dataset.video_key for dataset in prompts.datasets):
                yield "prompts.datasets: rollout.mode = 'sft' learns text only: remove image_key and video_key"
        elif self.max_prompt_length < 1:
            yield (
                f"sampling.rollout_max_response_len = {self.sampling.rollout_max_response_len} leaves no room for a "
                f"prompt in engine.context_length = {self.engine.context_length}: raise the latter"
            )
        elif self.max_prompt_length + self.sampling.rollout_max_response_len > self.max_context_length:
            yield (
                f"prompts.rollout_max_prompt_len = {self.max_prompt_length} and sampling.rollout_max_response_len = "
                f"{self.sampling.rollout_max_response_len} do not fit into {self.max_context_length} tokens: "
                "lower one of them, or raise engine.context_length"
            )

    def _reward_model_problems(self) -> Iterator[str]:
        rollout, kind = self.rollout, "train.kind = 'reward_model'"
        if rollout.mode is not RolloutMode.SFT or rollout.n_samples_per_prompt != 2:
            yield f"{kind} learns the pairs of data sets: remove rollout.mode and rollout.n_samples_per_prompt"
        if self.eval.has_sets:
            yield f"{kind} answers no prompts of [eval]: remove its sets; train/pair_accuracy is of pairs not yet seen"
        if self.cluster.kind is not ClusterKind.LOCAL:
            yield f"{kind} trains in this process: remove [cluster]"
        changed = [f"loss.{name}" for name in self.train.loss.changed_values() if name != "objective"]
        for name in (*changed, *({"head_precision"} & self.train.changed_values().keys())):
            yield f"train.{name} has no effect with {kind}, whose loss is of the scores of pairs: remove it"

    def _cluster_problems(self) -> Iterator[str]:
        cluster, launch = self.cluster, self.engine.launch
        if cluster.kind is ClusterKind.LOCAL:
            return
        if self.engine.sglang is not None and self.engine.sglang.router is not None:
            yield "engine.sglang.router: each worker of [cluster] needs servers of its own: name them in workers"
        if launch is not None and (launch.gpus or launch.colocate):
            key = "gpus" if launch.gpus else "colocate"
            yield f"engine.launch.{key}: GPUs of [cluster] are given out by Ray: remove it, and set gpus_per_server"
        most = self.num_servers
        if most is not None and (cluster.num_workers or 1) > most:
            yield f"cluster.num_workers = {cluster.num_workers}: there are {most} servers to share: lower it"

    def _objective_problems(self) -> Iterator[str]:
        loss, is_sft = self.train.loss, self.rollout.mode is RolloutMode.SFT
        if loss.objective is Objective.CROSS_ENTROPY and not is_sft:
            yield (
                "train.loss.objective = 'cross_entropy' is for answers that data sets bring: set rollout.mode = 'sft', "
                "or another objective"
            )
        if is_sft and "objective" in loss.model_fields_set and loss.objective is not Objective.CROSS_ENTROPY:
            yield (
                f"train.loss.objective = {loss.objective.value!r} compares policies, and rollout.mode = 'sft' samples "
                "from none: remove it"
            )

    @property
    def needs_engine(self) -> bool:
        """Whether something is sampled: by the run, or by the evaluations of its training."""
        return self.rollout.mode is not RolloutMode.SFT or (self.trains and self.eval.has_sets)

    @property
    def policy_servers(self) -> ServerSettings | None:
        """The servers that answer with the policy; None with the embedded engine, and where nothing is sampled."""
        return next(iter(self.engine.servers.values()), None) if self.needs_engine else None

    @property
    def num_servers(self) -> int | None:
        """Servers that are named or launched; None with the embedded engine."""
        launch = self.engine.launch
        tables = self.engine.servers.values()
        return next((len(table.addresses) if launch is None else launch.count for table in tables), None)

    @property
    def trains(self) -> bool:
        """Whether there is a ``[train]``: these are settings of a training, too."""
        return "train" in self.model_fields_set

    @property
    def max_context_length(self) -> int:
        """Tokens of prompt and response together."""
        return self.sampling.rollout_max_context_len or self.engine.context_length

    @property
    def max_prompt_length(self) -> int:
        """Tokens of the longest prompt that is answered; in ``sft`` mode with its answer."""
        if self.rollout.mode is RolloutMode.SFT:
            return self.max_context_length
        given = self.prompts.rollout_max_prompt_len
        return given if given is not None else self.max_context_length - self.sampling.rollout_max_response_len

    @property
    def max_sample_length(self) -> int:
        """Tokens of the longest sample, where no function of the user's makes it."""
        is_given = self.rollout.mode is RolloutMode.SFT
        return self.max_prompt_length + (0 if is_given else self.sampling.rollout_max_response_len)

    def resolved(self) -> dict[str, Any]:
        """Return all settings as the tables of a settings file; a ``[train]`` is there only where they train."""
        tree = self.model_dump(mode="json")
        if not self.trains:
            del tree["train"]
        return tree

    def identity(self) -> dict[str, Any]:
        """Return the settings that a resumed run does not change unnoticed, as dotted keys."""
        flat = flatten(self.model_dump(mode="json"))
        if self.reward.override_environments or not (self.prompts.environment_ids and self.plugins.has_reward):
            del flat["reward.override_environments"]  # as in runs of before, which have no such key
        free = {Resume.FREE} if self.rollout.deterministic else {Resume.FREE, Resume.FREE_UNLESS_DETERMINISTIC}
        return {key: value for key, value in flat.items() if self.resume_of(key) not in free}


def _with_mode_of_kind(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return given settings with those of ``[rollout]`` that training a reward model takes."""
    train, rollout = values.get("train"), values.get("rollout", {})
    if (
        not isinstance(train, Mapping)
        or train.get("kind") != TrainKind.REWARD_MODEL
        or not isinstance(rollout, Mapping)
    ):
        return values
    return {**values, "rollout": {"mode": "sft", "n_samples_per_prompt": 2, **rollout}}


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dictionaries as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
