"""From settings to parts: everything that a run is made of, built once, in any process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rollfeed import plugins
from rollfeed.app.batches import age_limit, batch_cutter, surplus_rule
from rollfeed.app.checks import check_combination, load_loss_function, no_images_of
from rollfeed.app.cluster import ClusterEngine, RemoteRunner, cluster_engine, settings_here
from rollfeed.app.gateway import generate_fn
from rollfeed.app.model import Model, load_settings_model, run_engine
from rollfeed.app.rewards import RewardServices, label_names, reward_hub
from rollfeed.app.sources import RowChecks, build_source
from rollfeed.app.stored_run import stored_template_date
from rollfeed.app.teaching import check_teacher, entered, make_teacher, no_pictures_of_teacher, scorer_of
from rollfeed.buffer import Buffer, Spill, built_in_policy
from rollfeed.compat.slime_plugins import SlimeRun, slime_run, with_slime_plugins
from rollfeed.config import RolloutConfig, RolloutMode, RunSpec, Settings
from rollfeed.config.cluster import ClusterKind
from rollfeed.config.paths import as_paths
from rollfeed.errors import ConfigError
from rollfeed.filters import build_batch_filter, build_filter, compose
from rollfeed.pipeline import (
    GroupPlan,
    GroupRunner,
    LengthHistory,
    Observers,
    OverSampling,
    Placement,
    RolloutParts,
    Rollouts,
    Scheduler,
    WeightFollower,
)
from rollfeed.prompts import DataLimit, MixtureSource, data_limit
from rollfeed.protocols import (
    AdvantageFn,
    BatchCutter,
    BatchFilter,
    BufferPolicy,
    Engine,
    GenerateFn,
    GroupFilter,
    Isolation,
    PromptSource,
    RolloutFn,
    RolloutObserver,
    SampleHook,
    Tokenizer,
    Tracker,
    TurnJournal,
)
from rollfeed.report import RunNumbers, check_port
from rollfeed.rewards.graders.marker_watch import MarkerWatch
from rollfeed.rewards.hub import RewardHub
from rollfeed.tracking import Trackers
from rollfeed.types import Prompt, RunState, StepCommit
from rollfeed.weights import Publisher, WeightBucket, WeightDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Functions:
    """The functions that answer, score and choose, the user's or ours; checked, and nothing is started."""

    generate: GenerateFn
    rollout: RolloutFn
    sample_hook: SampleHook | None
    group_filter: GroupFilter
    cut_batch: BatchCutter
    buffer_policy: BufferPolicy
    services: RewardServices
    scorer: RewardHub
    slime: SlimeRun | None = None
    """What those among them share that are written for slime."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """Everything a run is made of, checked and not yet started."""

    spec: RunSpec
    """With the date that chat templates are told: what is built from it elsewhere is the same run."""
    functions: Functions
    source: PromptSource
    engine: Engine
    model: Model
    trackers: Trackers
    rows: RowChecks
    """Whether rows of data sets can be answered and scored."""
    data_limit: DataLimit | None = None
    """How many batches there are, where the data ends."""
    numbers: RunNumbers = field(default_factory=RunNumbers)
    """Told of all metrics, for those who ask while the run goes on."""

    @property
    def settings(self) -> Settings:
        """The whole tree."""
        return self.spec.settings

    @property
    def dataset_prompts(self) -> Iterable[Prompt]:
        """Prompts that are known before they are drawn."""
        return self.source.dataset_prompts if isinstance(self.source, MixtureSource) else ()

    @property
    def num_batches(self) -> int:
        """Return the number of batches that there will be, as far as it is known."""
        num_rollout = self.settings.rollout.num_rollout
        return num_rollout if self.data_limit is None else min(num_rollout, self.data_limit.most)


def prepare(spec: RunSpec, *, out: str | Path | None = None, starts: bool = True) -> PreparedRun:
    """Make and check everything a run needs, without starting an engine or writing a file.

    Args:
        spec: The run.
        out: A run directory; where it holds a run that is resumed, chat templates are told that run's date.
        starts: Whether the run will be started; what is only checked may have an engine that cannot.

    Raises:
        ConfigError: If anything is wrong that can be known before the engine starts.
    """
    settings, folders = spec.settings, spec.folders
    trackers = load_trackers(settings, folders=folders)
    with_functions = with_slime_plugins(settings, folders=folders)
    functions = load_functions(with_functions, folders=folders)
    load_loss_function(settings.train.loss.function, folders=folders)
    check_combination(settings)
    if settings.metrics.port is not None:
        check_port(settings.metrics.host, settings.metrics.port)
    settings = _with_template_date(settings, None if out is None else stored_template_date(settings, Path(out)))
    model = load_settings_model(settings, samples=starts)
    check_teacher(settings, model.tokenizer)
    if settings.rollout.mode is not RolloutMode.SFT:
        functions.services.reward_model.prepare(model.tokenizer)
    settings = _with_template_date(settings, model.template_date)
    spec = replace(spec, settings=settings)
    engine = cluster_engine(spec, run_engine(model, settings_here(settings), folders=folders, starts=starts))
    rows = RowChecks(
        settings,
        unscored=None if settings.teacher else "set reward.rm_type or plugins.reward",
        no_images=no_pictures_of_teacher(settings)
        or no_images_of(settings.engine, model, is_cluster=settings.cluster.kind is not ClusterKind.LOCAL),
        function_problem=functions.scorer.function_problem,
        label_problems=functions.services.judges.problems(),
    )
    functions.services.picture_input = model.picture_input
    source = build_source(
        with_functions,
        model.tokenizer,
        folders=folders,
        rows=rows,
        tools=functions.services.toolbox.definitions,
        workers=functions.services.workers,
        picture_input=model.picture_input,
    )
    return PreparedRun(
        spec=spec,
        functions=functions,
        source=source,
        engine=engine,
        model=model,
        trackers=trackers,
        rows=rows,
        data_limit=data_limit(source, settings),
    )


def load_trackers(settings: Settings, *, folders: Sequence[Path] = ()) -> Trackers:
    """Return what tells the trackers of the settings; none of them is begun.

    Raises:
        ConfigError: If one is not installed, or the user's own does not fit its protocol.
    """
    given = settings.plugins.tracker
    own = None if given is None else plugins.load_factory(given, Tracker, key="plugins.tracker", folders=folders)
    return Trackers(settings.tracking, reward_key=settings.reward.reward_key, own=own)


def _with_template_date(settings: Settings, date: str | None) -> Settings:
    """Return settings with the date that chat templates are told, unless they name one."""
    if date is None or settings.model.template_date is not None:
        return settings
    model = settings.model.model_copy(update={"template_date": date})
    return settings.model_copy(update={"model": model})


def load_functions(config: RolloutConfig, *, folders: Sequence[str | Path] = ()) -> Functions:
    """Import the functions of the settings, and make those that these describe.

    Raises:
        ConfigError: If one does not exist, does not fit its protocol or has wrong parameters, or nothing grades as
            ``reward.rm_type`` says.
    """
    folders = as_paths(folders)
    load = partial(plugins.load_plugin, folders=folders)
    config = with_slime_plugins(config, folders=folders)
    own = config.plugins
    services = RewardServices(
        config.reward,
        rm_types=[config.reward.rm_type],
        tools=config.tools,
        folders=folders,
        deterministic=config.rollout.deterministic,
    )
    scheduler = Scheduler(
        settings=config.rollout, age_rule=age_limit(config), over_sampling=_over_sampling(config, folders)
    )
    slime = slime_run(config)
    generate = load(own.generate, GenerateFn, key="plugins.generate") or generate_fn(config, folders=folders)
    if slime is not None:
        from rollfeed.compat.slime_plugins.generating import by_sample

        slime.default_rollout = scheduler
        generate = by_sample(generate, slime) if own.prompt_source is not None else generate
    return Functions(
        generate=generate,
        rollout=load(own.rollout, RolloutFn, key="plugins.rollout") or scheduler,
        sample_hook=load(own.sample_hook, SampleHook, key="plugins.sample_hook"),
        group_filter=compose(_group_filters(config, folders)),
        cut_batch=batch_cutter(config, load(own.advantage, AdvantageFn, key="plugins.advantage")),
        buffer_policy=load(own.buffer_policy, BufferPolicy, key="plugins.buffer_policy")
        or built_in_policy(config.buffer.policy, staleness_limit=config.rollout.max_staleness),
        services=services,
        scorer=reward_hub(
            config.reward, own, services, label_names=label_names(config), seed=config.seed, folders=folders
        ),
        slime=slime,
    )


def open_rollouts(
    config: RolloutConfig,
    *,
    source: PromptSource,
    engine: Engine,
    tokenizer: Tokenizer,
    functions: Functions | None = None,
    folders: Sequence[str | Path] = (),
    state: RunState | None = None,
    commit: Callable[[StepCommit], None] | None = None,
    observers: Sequence[RolloutObserver] = (),
    on_isolation: Callable[[Isolation], None] | None = None,
    printed: str | Path | None = None,
    spill: Spill | None = None,
    turns: TurnJournal | None = None,
) -> Rollouts:
    """Return a rollout manager; enter it with ``async with``, then call ``generate_batch()``.

    Args:
        config: Settings and functions of the run.
        source: Where prompts come from.
        engine: Started and ended by the manager.
        tokenizer: The policy's.
        functions: What :func:`load_functions` has made of ``config``, if it has been asked before.
        folders: Where modules of functions are looked for that ``config`` names.
        state: Where an earlier run stopped; by default the beginning.
        commit: Stores a step before it is delivered; called in a thread.
        observers: Told what happens as it happens.
        on_isolation: Told once at which isolation level programs of the policy run, when the first one does.
        printed: The file that gets what functions print in workers; by default it is lost.
        spill: Where partial answers wait that are over ``buffer.max_memory_mb``; without it all stay in memory.
        turns: Where it is kept what rollouts of several turns have done; in memory without it.

    Raises:
        ConfigError: If a function does not fit its protocol, or the settings do not fit the engine.
    """
    made = functions or load_functions(config, folders=folders)
    made.services.on_isolation, made.services.workers.output = on_isolation, None if printed is None else Path(printed)
    if made.services.workers.output is not None:  # the run's own folder
        made.services.sandboxes.private.append(made.services.workers.output.parent)
    plugins.check_methods(source, PromptSource, key="source")
    plan = group_plan(config, made, engine, tokenizer, turns)
    if isinstance(engine, ClusterEngine):
        engine.workers.on_isolation, engine.workers.printed = on_isolation, made.services.workers.output
        engine.workers.judge_counts = made.services.judges.counts
    rollouts = Rollouts(
        plan=plan,
        parts=_parts(config, made, engine, spill),
        source=source,
        engine=engine,
        state=state,
        commit=commit,
        observers=Observers([*observers, MarkerWatch(rm_type=config.reward.rm_type)]),
        # Workers of a cluster have teachers of their own.
        resources=entered(made.services, None if isinstance(engine, ClusterEngine) else plan.teacher),
    )
    if made.slime is not None:
        made.slime.services, made.slime.tokenizer = rollouts.services, tokenizer
        made.slime.context_length = plan.max_context_length
    return rollouts


def group_plan(
    config: RolloutConfig, made: Functions, engine: Engine, tokenizer: Tokenizer, turns: TurnJournal | None
) -> GroupPlan:
    """Return what all groups of a run share.

    Raises:
        ConfigError: If answers may be longer than the engine takes.
    """
    max_context_length = config.sampling.rollout_max_context_len or engine.context_length
    if max_context_length > engine.context_length:
        raise ConfigError(
            f"sampling.rollout_max_context_len = {max_context_length}: the engine takes {engine.context_length} "
            "tokens; lower it"
        )
    return GroupPlan(
        settings=config.rollout,
        seed=config.seed,
        params=config.sampling.params,
        max_context_length=max_context_length,
        generate_fn=made.generate,
        services=made.services.for_generating(engine, tokenizer, config=config, journal=turns),
        scorer=scorer_of(config, made.scorer),
        sample_hook=made.sample_hook,
        teacher=make_teacher(config, tokenizer=tokenizer, context_length=max_context_length),
    )


def _parts(config: RolloutConfig, made: Functions, engine: Engine, spill: Spill | None) -> RolloutParts:
    publisher = Publisher(engine, is_proving=config.weights.proof.num_texts != 0)
    return RolloutParts(
        rollout_fn=made.rollout,
        group_filter=made.group_filter,
        cut_batch=made.cut_batch,
        surplus_rule=surplus_rule(config),
        buffer=Buffer(
            made.buffer_policy,
            n_samples_per_prompt=config.rollout.n_samples_per_prompt,
            max_bytes=config.buffer.max_memory_mb << 20,
            spill=spill,
        ),
        placement=_placement(config),
        publisher=publisher,
        weights=_weight_follower(config, publisher),
        reward_metrics=made.services.judges.counts.take,
        new_runner=partial(RemoteRunner, engine.workers) if isinstance(engine, ClusterEngine) else GroupRunner,
    )


def _group_filters(config: RolloutConfig, folders: Sequence[Path]) -> list[GroupFilter]:
    filters, reward_key = list[GroupFilter](), config.reward.reward_key
    size = config.rollout.n_samples_per_prompt
    for chosen in config.filters.dynamic_sampling:
        try:
            filters.append(
                build_filter(chosen.name, chosen.parameters, n_samples_per_prompt=size, reward_key=reward_key)
            )
        except ConfigError as error:
            raise ConfigError(f"filters.dynamic_sampling: {error}") from None
    for given in config.plugins.group_filters:
        filters.append(plugins.load_plugin(given, GroupFilter, key="plugins.group_filters", folders=folders))
    return filters


def _over_sampling(config: RolloutConfig, folders: Sequence[Path]) -> OverSampling | None:
    own, chosen = config.plugins.batch_filter, config.filters.over_sampling
    batch_filter = plugins.load_plugin(own, BatchFilter, key="plugins.batch_filter", folders=folders)
    if batch_filter is None and chosen is not None and chosen.name is not None:
        try:
            batch_filter = build_batch_filter(chosen.name, chosen.parameters, reward_key=config.reward.reward_key)
        except ConfigError as error:
            raise ConfigError(f"filters.over_sampling: {error}") from None
    return None if batch_filter is None else OverSampling(batch_filter, config.num_extra_groups)


def _placement(config: RolloutConfig) -> Placement:
    chosen = config.placement
    if not (chosen.long_first or chosen.tail_batching):
        return Placement()
    round_size = config.rollout.first_submission if chosen.tail_batching else None
    return Placement(LengthHistory(), long_first=chosen.long_first, round_size=round_size)


def _weight_follower(config: RolloutConfig, publisher: Publisher) -> WeightFollower | None:
    weights, rollout = config.weights, config.rollout
    if weights.directory is None:
        return None
    find = WeightBucket if "://" in weights.directory else WeightDirectory
    return WeightFollower(
        find(weights.directory, poll_seconds=weights.poll_seconds),
        publisher,
        max_lag=(rollout.max_staleness or 0) if rollout.mode is RolloutMode.ASYNC else 0,
        poll_seconds=weights.poll_seconds,
        timeout_seconds=weights.timeout_seconds,
    )
