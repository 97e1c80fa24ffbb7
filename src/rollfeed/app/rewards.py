"""The reward hub with all that it needs: worker processes, sandboxes, a reward server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollfeed import plugins
from rollfeed.config import (
    CodeRewardSettings,
    PluginSettings,
    RemoteRewardSettings,
    RewardSettings,
    RolloutConfig,
    WorkerSettings,
)
from rollfeed.config.api_key import ApiKey
from rollfeed.environments import RLVE_RM_TYPE, EnvironmentGrader, EnvironmentRegistry, RlveGrader
from rollfeed.environments import RM_TYPE as ENVIRONMENT_RM_TYPE
from rollfeed.errors import ConfigError
from rollfeed.protocols import BatchedRewardFn, ExecLimits, Grader, Isolation, RewardFn, Workers
from rollfeed.rewards import (
    BUILTIN_GRADERS,
    Form,
    OwnPace,
    RemoteGrader,
    RewardHub,
    Takes,
    in_workers,
    runs_in_workers,
)
from rollfeed.rewards.code import CodeGrader
from rollfeed.rewards.registry import grader_name
from rollfeed.rewards.rows import as_grader
from rollfeed.sandbox import OnDemandSandboxes
from rollfeed.types import Outcome, Verdict
from rollfeed.workers import OnDemandPool, WorkerPool

CODE_RM_TYPE = "livecodebench"
REMOTE_RM_TYPE = "remote_rm"
_WARM_UP = ("rollfeed.rewards.equality.numeric",)
_MEGABYTE = 1024**2


class RewardServices:
    """What graders use that must be ended: entered and left with the run, started on first use.

    Args:
        workers: The processes.
        code: Programs and their tests.
        remote: The reward server.
        on_isolation: Told once which isolation programs run at.
        rm_type: Of most responses: for programs, isolation is found out on entering and not with the first one.

    Raises:
        ConfigError: If the variable that should hold the reward server's key does not.
    """

    def __init__(
        self,
        *,
        workers: WorkerSettings,
        code: CodeRewardSettings,
        remote: RemoteRewardSettings,
        on_isolation: Callable[[Isolation], None] | None = None,
        rm_type: str | None = None,
    ) -> None:
        self._runs_programs = rm_type is not None and grader_name(rm_type) == CODE_RM_TYPE
        pool = WorkerPool(
            num_workers=workers.num_workers or num_cores(),
            warm_up=_WARM_UP,
            memory_limit_bytes=workers.memory_mb * _MEGABYTE,
        )
        self.workers = OnDemandPool(pool)
        self.worker_timeout_seconds = workers.timeout_seconds
        self.sandboxes = OnDemandSandboxes(
            level=code.isolation, max_running=code.concurrency, on_isolation=on_isolation
        )
        self.remote = RemoteGrader(
            url=remote.url,
            api_key=ApiKey.read(remote.api_key_env, setting="reward.remote.api_key_env"),
            form=Form(remote.form.value),
            reply_key=remote.reply_key,
            timeout_seconds=remote.timeout_seconds,
            max_tries=remote.max_tries,
            concurrency=remote.concurrency,
        )
        limits = ExecLimits(wall_seconds=code.test_timeout_seconds, memory_bytes=code.memory_mb * _MEGABYTE)
        self._code = _InTurns(
            CodeGrader(sandboxes=self.sandboxes, limits=limits),
            num_turns=code.concurrency or num_cores(),
            timeout_seconds=code.timeout_seconds,
        )

    async def __aenter__(self) -> RewardServices:
        """Start nothing but what is sure to be needed.

        Raises:
            ConfigError: If programs are to run and no isolation level, or not the wanted one, holds here.
        """
        if self._runs_programs:
            await self.sandboxes.start()
        self._entered = AsyncExitStack()
        await self._entered.enter_async_context(self.workers)
        await self._entered.enter_async_context(self.remote)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._entered.aclose()

    def graders(self) -> dict[str, Grader | OwnPace]:
        """Return all graders by ``rm_type``."""
        registry, deadline = EnvironmentRegistry(), self.worker_timeout_seconds
        return {
            **BUILTIN_GRADERS,
            ENVIRONMENT_RM_TYPE: OwnPace(EnvironmentGrader(registry, workers=self.workers, deadline_seconds=deadline)),
            RLVE_RM_TYPE: OwnPace(RlveGrader(registry, workers=self.workers, deadline_seconds=deadline)),
            CODE_RM_TYPE: OwnPace(self._code),
            REMOTE_RM_TYPE: OwnPace(self.remote),
        }


async def check_isolation(code: CodeRewardSettings) -> None:
    """Try out whether programs can be kept from the machine as the settings insist.

    Raises:
        ConfigError: If the level does not hold here, or none does.
    """
    await OnDemandSandboxes(level=code.isolation).start()


class _InTurns:
    """Calls an async grader a few times at once, each within a deadline from its turn."""

    def __init__(self, grader: CodeGrader, *, num_turns: int, timeout_seconds: float) -> None:
        self._grader = grader
        self._turns = asyncio.Semaphore(num_turns)
        self._timeout_seconds = timeout_seconds

    async def __call__(self, response: str, label: Any, metadata: Mapping[str, Any]) -> Verdict:
        async with self._turns:
            try:
                async with asyncio.timeout(self._timeout_seconds) as deadline:
                    return await self._grader(response, label, metadata)
            except TimeoutError:
                if not deadline.expired():
                    raise
                detail = f"the tests were not done within {self._timeout_seconds:g} s"
                return Verdict(reward=None, outcome=Outcome.TIMEOUT, detail=detail)


@dataclass(frozen=True, slots=True)
class PluginFunction:
    """A reward function that a settings file names, to be called in a worker as soon as there are workers."""

    path: str
    takes: Takes
    folders: tuple[Path, ...]
    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


def load_reward_function(
    path: str, protocol: type[Any], takes: Takes, *, key: str, folders: Sequence[Path], killable: bool
) -> Any:
    """Import a reward function and check that it fits; unless it is async, it will be called in workers.

    Args:
        path: ``module:name``.
        protocol: What it must fit.
        takes: Its arguments.
        key: The setting that names it.
        folders: Searched for the module.
        killable: Whether workers are wanted.

    Raises:
        PluginError: If it cannot be imported or does not fit.
    """
    function = plugins.load_plugin(path, protocol, key=key, folders=folders)
    if not killable or not runs_in_workers(function):
        return function
    return PluginFunction(path=path, takes=takes, folders=tuple(folders), function=function)


def in_its_place(function: Any, workers: Workers, *, timeout_seconds: float) -> Any:
    """Return the function as the hub is to call it."""
    if not isinstance(function, PluginFunction):
        return function
    placed = in_workers(
        function.path,
        takes=function.takes,
        folders=function.folders,
        workers=workers,
        deadline_seconds=timeout_seconds,
    )
    return replace(placed, calls=function.function)


def reward_hub(
    config: RolloutConfig,
    services: RewardServices,
    *,
    graders: Mapping[str, Grader],
    rm_type: str | None,
    reward_key: str | None,
    seed: int,
    has_functions: bool = True,
) -> RewardHub:
    """Return the hub that scores as ``config`` says.

    Args:
        config: Has the functions.
        services: What graders use.
        graders: Further ones by ``rm_type``.
        rm_type: For prompts that name none.
        reward_key: Which entry of a reward dictionary counts.
        seed: Of the run or set.
        has_functions: Whether the reward functions of ``config`` score, besides those that prompts choose.

    Raises:
        ConfigError: If there is no grader ``rm_type``.
    """

    def place(function: Any) -> Any:
        return in_its_place(function, services.workers, timeout_seconds=config.reward_timeout_seconds)

    functions = {
        "reward_fn": config.reward,
        "batched_reward_fn": config.batched_reward,
        "group_reward_fn": config.group_reward,
    }
    return RewardHub(
        graders={**services.graders(), **graders},
        rm_type=rm_type,
        own_verifiers=own_verifiers(overridden=config.override_environments),
        **{name: place(function) if has_functions else None for name, function in functions.items()},
        named_reward_fns={name: place(function) for name, function in config.named_rewards.items()},
        reward_key=reward_key,
        seed=seed,
        timeout_seconds=config.reward_timeout_seconds,
        concurrency=config.reward_concurrency,
        workers=services.workers,
        worker_timeout_seconds=services.worker_timeout_seconds,
    )


@asynccontextmanager
async def open_reward_hub(
    settings: RewardSettings, *, functions: PluginSettings | None = None, folders: Sequence[Path] = ()
) -> AsyncIterator[RewardHub]:
    """Give a hub that grades single responses, with everything it needs; leaving ends what it started.

    Args:
        settings: Of graders, functions and all they use; ``rm_type`` may be a function, as ``module:name``.
        functions: Those that score whatever names none.
        folders: Where modules of functions are looked for.

    Raises:
        ConfigError: If the settings name a grader that does not exist, or a function that sees whole groups.
        PluginError: If a function cannot be imported or does not fit.
    """
    chosen = functions or PluginSettings()
    if chosen.group_reward is not None:
        raise ConfigError(
            f"plugins.group_reward = {chosen.group_reward!r}: it scores groups, and responses are graded one by one "
            "here: name a plugins.reward instead"
        )
    services = RewardServices(
        workers=settings.workers, code=settings.code, remote=settings.remote, rm_type=settings.rm_type
    )

    def load(path: str | None, protocol: type[Any], takes: Takes, key: str) -> Any:
        if path is None:
            return None
        killable = settings.functions_in_workers
        function = load_reward_function(path, protocol, takes, key=key, folders=folders, killable=killable)
        return place(function)

    def place(function: Any) -> Any:
        return in_its_place(function, services.workers, timeout_seconds=settings.timeout_seconds)

    graders, rm_type = services.graders(), settings.rm_type
    if rm_type is not None and ":" in rm_type:
        graders[rm_type] = as_grader(load(rm_type, RewardFn, Takes.SAMPLE, "rm_type"))
    hub = RewardHub(
        graders=graders,
        rm_type=rm_type,
        own_verifiers=own_verifiers(overridden=settings.override_environments),
        reward_fn=load(chosen.reward, RewardFn, Takes.SAMPLE, "plugins.reward"),
        batched_reward_fn=load(chosen.batched_reward, BatchedRewardFn, Takes.SAMPLES, "plugins.batched_reward"),
        named_reward_fns={name: place(each) for name, each in load_named_functions(settings, folders=folders).items()},
        reward_key=settings.reward_key,
        timeout_seconds=settings.timeout_seconds,
        concurrency=settings.concurrency,
        workers=services.workers,
        worker_timeout_seconds=services.worker_timeout_seconds,
    )
    async with services:
        yield hub


def own_verifiers(*, overridden: bool) -> tuple[str, ...]:
    """Return the ``rm_type`` of prompts that reward functions do not score."""
    return () if overridden else (ENVIRONMENT_RM_TYPE,)


def load_named_functions(settings: RewardSettings, *, folders: Sequence[Path]) -> dict[str, Any]:
    """Import the reward functions that prompts may choose.

    Raises:
        PluginError: If one cannot be imported or does not fit.
    """
    return {
        name: load_reward_function(
            path,
            RewardFn,
            Takes.SAMPLE,
            key=f"reward.functions.{name}",
            folders=folders,
            killable=settings.functions_in_workers,
        )
        for name, path in settings.functions.items()
    }


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))
