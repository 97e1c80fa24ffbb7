"""The reward hub with all that it needs: worker processes, sandboxes, a reward server, judges."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rollfeed.app.scoring.reward_functions import load_reward_function
from rollfeed.app.scoring.reward_models import RunRewardModel
from rollfeed.base.cores import num_cores
from rollfeed.base.printing import keeping_prints
from rollfeed.compat.slime_plugins import slime_run, with_slime_plugins
from rollfeed.config import CodeRewardSettings, PluginSettings, RewardSettings, RolloutConfig, Settings
from rollfeed.config.paths import as_paths
from rollfeed.config.plugins import import_path_of
from rollfeed.config.reward import is_judge
from rollfeed.config.reward_model import REWARD_MODEL_RM_TYPE
from rollfeed.config.tools import ToolSettings
from rollfeed.environments import RLVE_RM_TYPE, EnvironmentGrader, EnvironmentRegistry, RlveGrader
from rollfeed.environments import RM_TYPE as ENVIRONMENT_RM_TYPE
from rollfeed.errors import ConfigError
from rollfeed.generate import default_generate
from rollfeed.protocols import (
    BatchedRewardFn,
    ExecLimits,
    Grader,
    GroupRewardFn,
    Isolation,
    PictureInput,
    RewardFn,
    Services,
    TokenEndpoint,
    Tokenizer,
    TurnJournal,
)
from rollfeed.rewards.by_name import Takes
from rollfeed.rewards.calls import OfSamples, OwnPace
from rollfeed.rewards.code.grader import CodeGrader, InTurns
from rollfeed.rewards.hub import RewardHub
from rollfeed.rewards.judging import Judges
from rollfeed.rewards.over_http.remote import RemoteGrader
from rollfeed.rewards.registry import BUILTIN_GRADERS, CODE_RM_TYPE, REMOTE_RM_TYPE, grader_name
from rollfeed.rewards.rows import as_grader
from rollfeed.rewards.scoring import Graded, ResultFile, ScoreCounts, check_plain, grade_all, read_rows
from rollfeed.sandbox import Container, OnDemandSandboxes
from rollfeed.tools import LimitedToolbox, make_tools
from rollfeed.workers import WorkerPool

_WARM_UP = ("rollfeed.rewards.equality.numeric",)
_MEGABYTE = 1024**2


class RewardServices:
    """Processes and connections of graders and generate functions: entered and left with the run, started on first use.

    Where a grader of ``rm_types`` runs programs, isolation is found out on entering and not with the first one.
    ``deterministic`` has equal runs have equal rewards of a model that is loaded here.

    Raises:
        ConfigError: If the variable that should hold the reward server's key does not, or a tool cannot be made.
    """

    def __init__(
        self,
        settings: RewardSettings,
        *,
        rm_types: Sequence[str | None],
        tools: ToolSettings | None = None,
        folders: Sequence[Path] = (),
        deterministic: bool = False,
    ) -> None:
        self.on_isolation: Callable[[Isolation], None] | None = None
        """Told once at which isolation level programs of the policy run, when the first one does."""
        self.picture_input: PictureInput | None = None
        """The way of pictures into turns, set by who has the model."""
        tools = tools or ToolSettings()
        self._runs_programs = tools.runs_programs or any(
            name is not None and grader_name(name) == CODE_RM_TYPE for name in (*rm_types, *settings.rm_types)
        )
        workers, code = settings.workers, settings.code
        self.workers = WorkerPool(
            num_workers=workers.num_workers or num_cores(),
            warm_up=_WARM_UP,
            memory_limit_bytes=workers.memory_mb * _MEGABYTE,
        )
        self.environments = EnvironmentRegistry()
        self._deadline_seconds = workers.timeout_seconds
        self.sandboxes = _sandboxes(code, on_isolation=self._tell_isolation, private=folders)
        self.remote = RemoteGrader(settings.remote)
        self.judges = Judges(settings, folders=folders)
        self.reward_model = RunRewardModel(settings, alone=deterministic)
        limits = ExecLimits(wall_seconds=code.test_timeout_seconds, memory_bytes=code.memory_mb * _MEGABYTE)
        self._code = InTurns(
            CodeGrader(sandboxes=self.sandboxes, limits=limits, total_seconds=code.timeout_seconds),
            num_turns=code.concurrency or num_cores(),
            timeout_seconds=limits.patience * code.timeout_seconds,
        )
        memory_bytes = code.memory_mb * _MEGABYTE
        made = make_tools(
            tools, sandboxes=self.sandboxes, memory_bytes=memory_bytes, workers=self.workers, folders=folders
        )
        self.toolbox = LimitedToolbox(made, tools)

    def _tell_isolation(self, isolation: Isolation) -> None:
        if self.on_isolation is not None:
            self.on_isolation(isolation)

    async def __aenter__(self) -> RewardServices:
        """Start nothing but what is sure to be needed.

        Raises:
            ConfigError: If programs are to run and no isolation level, or not the wanted one, holds here, or a judge
                does not answer.
        """
        if self._runs_programs:
            await self.sandboxes.start()
        async with AsyncExitStack() as stack:  # what was entered is left again where the next part cannot be
            await stack.enter_async_context(self.judges)
            if self.workers.output is not None:
                stack.enter_context(keeping_prints(self.workers.output))
            await stack.enter_async_context(self.workers)
            await stack.enter_async_context(self.remote)
            await stack.enter_async_context(self.reward_model)
            await stack.enter_async_context(self.toolbox)
            self._entered = stack.pop_all()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._entered.aclose()

    def graders(self) -> dict[str, Grader | OwnPace]:
        """Return all graders by ``rm_type``."""
        registry, deadline = self.environments, self._deadline_seconds
        return {
            **BUILTIN_GRADERS,
            ENVIRONMENT_RM_TYPE: OwnPace(EnvironmentGrader(registry, workers=self.workers, deadline_seconds=deadline)),
            RLVE_RM_TYPE: OwnPace(RlveGrader(registry, workers=self.workers, deadline_seconds=deadline)),
            CODE_RM_TYPE: OwnPace(self._code),
            REMOTE_RM_TYPE: OwnPace(self.remote),
            **self.judges.graders(),
            REWARD_MODEL_RM_TYPE: OfSamples(self.reward_model),
        }

    def for_generating(
        self,
        endpoint: TokenEndpoint,
        tokenizer: Tokenizer,
        *,
        config: RolloutConfig,
        journal: TurnJournal | None = None,
    ) -> Services:
        """Return what generate functions may use.

        Raises:
            ConfigError: If there is a reward model that does not fit the policy's tokenizer.
        """
        self.reward_model.prepare(tokenizer)
        return Services(
            endpoint=endpoint,
            tokenizer=tokenizer,
            default=default_generate,
            environments=self.environments,
            sandboxes=self.sandboxes,
            workers=self.workers,
            step_timeout_seconds=self._deadline_seconds,
            journal=journal or TurnJournal(),
            tools=self.toolbox,
            rewritten_turns=config.rollout.rewritten_turns,
            picture_input=self.picture_input,
            environments_judge=not (config.reward.override_environments and config.plugins.has_reward),
        )


async def check_isolation(code: CodeRewardSettings) -> None:
    """Try out whether programs can be kept from the machine as the settings insist.

    Raises:
        ConfigError: If the level does not hold here, or none does.
    """
    await _sandboxes(code).start()


def _sandboxes(
    code: CodeRewardSettings,
    *,
    on_isolation: Callable[[Isolation], None] | None = None,
    private: Sequence[Path] = (),
) -> OnDemandSandboxes:
    return OnDemandSandboxes(
        level=code.isolation,
        max_running=code.concurrency,
        container=Container(
            engine=code.container_engine, image=code.container_image, memory_bytes=code.memory_mb * _MEGABYTE
        ),
        on_isolation=on_isolation,
        private=private,
    )


def reward_hub(
    settings: RewardSettings,
    functions: PluginSettings,
    services: RewardServices,
    *,
    graders: Mapping[str, Grader] | None = None,
    label_names: Collection[str] = (),
    seed: int = 0,
    folders: Sequence[Path] = (),
) -> RewardHub:
    """Return the hub that scores as ``[reward]`` and the functions of ``[plugins]`` say.

    A function that is named by its import path and not async is called in the workers.

    ``functions`` score whatever names no other scorer; ``graders`` are further ones, by ``rm_type``;
    ``label_names`` are columns of labels, by which functions may ask for them.

    Raises:
        ConfigError: If there is no grader ``rm_type``.
        PluginError: If a function cannot be imported or does not fit.
    """
    load = partial(
        load_reward_function,
        settings=settings,
        workers=services.workers,
        folders=folders,
        label_names=sorted(label_names),
    )
    config = RolloutConfig().model_copy(update={"reward": settings, "plugins": functions, "seed": seed})
    config = with_slime_plugins(config, folders=folders)
    settings, functions, slime = config.reward, config.plugins, slime_run(config)
    make = partial(
        RewardHub,
        graders={**services.graders(), **(graders or {})},
        rm_type=settings.rm_type,
        reward_key=settings.reward_key,
        seed=seed,
        timeout_seconds=settings.timeout_seconds,
        workers=services.workers,
        worker_timeout_seconds=settings.workers.timeout_seconds,
    )
    named: Mapping[str, RewardFn] = {
        name: load(given, RewardFn, Takes.SAMPLE, f"reward.functions.{name}")
        for name, given in settings.functions.items()
    }
    if slime is not None:
        from rollfeed.compat.slime_plugins.adapters import NamedRewards

        slime.hub, named = make(), NamedRewards(named, slime)  # the hub is for functions that ask for a grader
    return make(
        own_verifiers=own_verifiers(settings),
        reward_fn=load(functions.reward, RewardFn, Takes.SAMPLE, "plugins.reward"),
        batched_reward_fn=load(functions.batched_reward, BatchedRewardFn, Takes.SAMPLES, "plugins.batched_reward"),
        group_reward_fn=load(functions.group_reward, GroupRewardFn, Takes.GROUP, "plugins.group_reward"),
        named_reward_fns=named,
        mixture=settings.mixture,
        verifier=settings.verifier,
        concurrency=settings.concurrency,
    )


def label_names(config: RolloutConfig) -> set[str]:
    """Return the columns of labels of all data sets, by which reward functions may ask for them."""
    if not isinstance(config, Settings):
        return set()
    keys = {config.eval.label_key, *(each.label_key for each in config.eval.datasets)}
    keys.update(each.label_key for each in config.prompts.datasets)
    return {key for key in keys if key is not None}


@asynccontextmanager
async def open_reward_hub(
    settings: RewardSettings,
    *,
    functions: PluginSettings | None = None,
    label_names: Collection[str] = (),
    folders: Sequence[Path] = (),
    more_rm_types: Sequence[str] = (),
) -> AsyncIterator[RewardHub]:
    """Give a hub that grades single responses, with everything it needs; leaving ends what it started.

    ``rm_type`` may be a function here, as ``module:name``. ``more_rm_types`` are those that responses may name.

    Raises:
        ConfigError: As :func:`reward_hub`; and if a function sees whole groups.
    """
    chosen = functions or PluginSettings()
    if chosen.group_reward is not None:
        raise ConfigError(
            f"plugins.group_reward = {chosen.group_reward!r}: it scores groups, and responses are graded one by one "
            "here: name a plugins.reward instead"
        )
    services = RewardServices(settings, rm_types=[settings.rm_type, *more_rm_types], folders=folders)
    own, graders = settings.rm_type, {}
    if own is not None and ":" in own and not is_judge(own):
        load = partial(load_reward_function, settings=settings, workers=services.workers, folders=folders)
        graders[own] = as_grader(load(own, RewardFn, Takes.SAMPLE, "rm_type"))
    hub = reward_hub(settings, chosen, services, graders=graders, label_names=label_names, folders=folders)
    if problem := next(filter(None, map(hub.problem, more_rm_types)), None):
        raise ConfigError(problem)
    async with services:
        yield hub


async def grade_rows(
    rows: Iterable[Mapping[str, Any]],
    settings: RewardSettings | None = None,
    *,
    functions: PluginSettings | None = None,
    folders: Sequence[str | Path] = (),
) -> AsyncIterator[dict[str, Any]]:
    """Grade rows and give one result each, in order; several are graded at once.

    Args:
        rows: As :func:`rollfeed.rewards.scoring.grade_all` takes them.
        settings: Of graders, workers, sandboxes and the reward server; its ``rm_type``, which may be a function as
            ``module:name``, is for rows without one.
        functions: Functions that score all other rows, as in training.
        folders: Where modules of functions are looked for.

    Yields:
        ``id``, ``reward`` (None unless the outcome is ``ok``), ``outcome``, ``extracted``, ``seconds`` and ``detail``.
    """
    async for graded in _grade(rows, settings or RewardSettings(), functions or PluginSettings(), as_paths(folders)):
        yield graded.result()


async def score_file(
    path: str | Path,
    out: str | Path,
    *,
    read: Callable[[Path], Iterator[Mapping[str, Any]]] = read_rows,
    settings: RewardSettings | None = None,
    functions: PluginSettings | None = None,
    label_names: Collection[str] = (),
    folders: Sequence[str | Path] = (),
    progress: Callable[[ScoreCounts], None] | None = None,
) -> ScoreCounts:
    """Grade the rows of a JSONL file into another, which appears when it is complete.

    Rows are as :func:`grade_rows` takes them, one a line; blank lines do not count, and ``progress`` is told after each
    row. ``read`` gives the rows of what is no JSONL file, and is called twice; ``label_names`` are columns of labels,
    by which functions may ask for them.

    Raises:
        DataError: If ``path`` is not such a file, or ``out`` cannot be made.
        PluginError: If a function cannot be imported or does not fit.
        RunFailedError: If ``out`` cannot be written to its end.
    """
    started, path, out = time.monotonic(), Path(path), Path(out)
    check_plain(path, out, is_folder=read is not read_rows)
    counts = ScoreCounts(total=await asyncio.to_thread(lambda: sum(1 for _ in read(path))))
    with ResultFile(out) as file:
        chosen = (settings or RewardSettings(), functions or PluginSettings())
        grading = _grade(read(path), *chosen, as_paths(folders), label_names)
        async with aclosing(grading):
            async for graded in grading:
                file.write(json.dumps(graded.result()))
                counts.add(graded.scored_by, graded.verdict)
                counts.seconds = time.monotonic() - started
                if progress is not None:
                    progress(counts)
    return counts


async def _grade(
    rows: Iterable[Mapping[str, Any]],
    settings: RewardSettings,
    functions: PluginSettings,
    folders: Sequence[Path],
    label_names: Collection[str] = (),
) -> AsyncGenerator[Graded, None]:
    function = functions.reward or functions.batched_reward
    async with open_reward_hub(settings, functions=functions, label_names=label_names, folders=folders) as hub:
        grading = grade_all(
            rows,
            hub,
            settings=settings,
            function=None if function is None else import_path_of(function),
            own_verifiers=own_verifiers(settings),
            num_turns=num_cores(),
        )
        async with aclosing(grading):
            async for graded in grading:
                yield graded


def own_verifiers(settings: RewardSettings) -> tuple[str, ...]:
    """Return the ``rm_type`` of prompts that reward functions do not score."""
    return () if settings.override_environments else (ENVIRONMENT_RM_TYPE,)
