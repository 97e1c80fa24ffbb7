"""Everything that the slime plug-ins of a run share, and what one of them is doing right now."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollfeed.base.importing import import_object
from rollfeed.compat.slime_plugins.slime_args import SlimeArguments
from rollfeed.compat.slime_plugins.slime_paths import SLIME, import_path
from rollfeed.errors import RollfeedError, RunFailedError
from rollfeed.faults import blaming, complaint
from rollfeed.protocols import RolloutFn, RolloutRequest, Services, Tokenizer
from rollfeed.types import Completion, SamplingParams

T = TypeVar("T")


class SlimeUseError(RollfeedError):
    """A plug-in uses something of slime in a way that is not supplied; who called it adds file and line."""


@dataclass(slots=True, kw_only=True)
class SlimeRun:
    """The arguments of a run, and what its plug-ins may use once it has started."""

    args: SlimeArguments
    params: SamplingParams
    """Of training, without a seed."""
    services: Services | None = None
    """Of training; None before the run is opened."""
    tokenizer: Tokenizer | None = None
    """The policy's, as soon as it is known."""
    hub: Any = None
    """A ``RewardHub``: scores by ``rm_type`` for plug-ins that ask."""
    default_rollout: RolloutFn | None = None
    """What slime's ``generate_rollout`` stands for."""
    state: Any = None
    """The ``GenerateState`` of the run."""
    drop_filters: list[Callable[..., Any]] = field(default_factory=list)
    """Filters whose True means drop, whoever calls them."""
    scores_lists: bool = False
    """Whether the run's reward function is called with a list of samples."""
    folders: Sequence[Path] = ()
    """Searched for modules that plug-ins load."""
    context_length: int = 1 << 31
    """Prompt and response tokens of an answer together, at most."""

    def load(self, path: str) -> Any:
        """Return what ``module.name``, as slime writes it, names; raises PluginError where that cannot be imported."""
        return import_object(import_path(f"{SLIME}{path}"), key="load_function", folders=self.folders)


class Sent(NamedTuple):
    """One request to the engine, P tokens, and its answer."""

    prompt_ids: NDArray[np.int32]
    completion: Completion


@dataclass(slots=True, kw_only=True)
class Work:
    """One call of a plug-in that may ask the engine."""

    run: SlimeRun
    services: Services
    request: RolloutRequest | None = None
    """The answering that it is for; None where a rollout function asks for itself."""
    step: int = 0
    sent: list[Sent] = field(default_factory=list)
    bridge: Any = None
    """The ``Bridge`` of a rollout function."""
    num_asked: int = 0
    sessions: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    """Of agents, each as what ends it."""
    task: asyncio.Task[Any] | None = None
    """In which it is, as long as it may be cancelled."""
    was_aborted: bool = False
    """Whether it was cancelled because the engine was told to abort what an agent asked."""
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    """The run's; a rollout function has another."""

    def abort(self) -> None:
        """Cancel it: the engine was told to abort what an agent asked."""
        if self.task is not None and not self.was_aborted:
            self.was_aborted = self.task.cancel()

    async def on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Await something in the loop of the run."""
        if asyncio.get_running_loop() is self.loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))


CURRENT: ContextVar[Work | None] = ContextVar("slime_work", default=None)
"""What the plug-in that is being called works on; tasks and threads that it starts inherit it."""


RUNNING: ContextVar[SlimeRun | None] = ContextVar("slime_run", default=None)
"""The run whose reward function, filter, buffer filter or hook is being called."""
_runs: list[SlimeRun] = []


def begin(run: SlimeRun) -> SlimeRun:
    """Have supplied functions that are handed nothing of a run work for this one."""
    _runs[:] = [run]
    return run


def latest() -> SlimeRun:
    """Return the run that the calling plug-in belongs to; the newest one where that is not known.

    Raises:
        SlimeUseError: If there is none.
    """
    work = CURRENT.get()
    run = RUNNING.get() if work is None else work.run
    if run is None and not _runs:
        raise SlimeUseError("no run has been set up: slime's functions work in plug-ins named in [plugins]")
    return run or _runs[0]


def current(what: str) -> Work:
    """Return what the plug-in is called for.

    Raises:
        SlimeUseError: If no generate or rollout function is being called; ``what`` says who asked.
    """
    work = CURRENT.get()
    if work is None:
        raise SlimeUseError(f"{what} works in generate and rollout functions only, while a run calls them")
    return work


class Adapter(ABC):
    """A function for slime in the place of one of ours; errors name the user's function.

    Args:
        function: The user's.
        run: What it shares with the others.
        key: The setting that names it.
    """

    def __init__(self, function: Callable[..., Any], run: SlimeRun, *, key: str) -> None:
        self.call = function
        self.run = run
        self.key = key
        self.__wrapped__ = function
        self.__signature__ = inspect.signature(self.__call__)  # of the adapter, not of what it wraps

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def call_in_run(self, *args: Any) -> Any:
        """Call the function with the run's args, and what it is called with."""
        token = RUNNING.set(self.run)
        try:
            return self.call(self.run.args, *args)
        finally:
            RUNNING.reset(token)

    def broke(self, told: str) -> RunFailedError:
        """Return the error for what the function did against its promise."""
        return complaint(self.key, self.call, told)

    def extra(self, **known: Any) -> dict[str, Any]:
        """Return the keyword arguments among ``known`` that the function takes."""
        return keywords_of(self.call, **known)


def leaves(group: Sequence[Any]) -> list[Any]:
    """Return all samples of a group, those of an answering that has forked one after the other."""
    return [leaf for each in group for leaf in (each if isinstance(each, list) else [each])]


async def awaited(result: Any) -> Any:
    """Return what a function gave that may be async."""
    return await result if inspect.isawaitable(result) else result


async def hooked(made: Any, args: Any, load: Callable[[str], Any], **about: Any) -> Any:
    """Return a sample, or those of an answering that has forked, as the hooks that ``args`` name leave it."""
    if isinstance(made, list):
        return [await hooked(each, args, load, **about) for each in made]
    for hook in map(load, getattr(args, "rollout_sample_hook_path", None) or ()):
        with blaming("rollout_sample_hook_path", hook):
            returned = await awaited(hook(args, made, **keywords_of(hook, **about)))
            if returned is not None and not isinstance(returned, type(made)):
                raise TypeError(f"it returned {returned!r:.80}; it must return a Sample, or None")
        made = made if returned is None else returned
    return made


def told_of_evaluation(function: Callable[..., Any], evaluation: bool) -> dict[str, bool]:
    """Return ``evaluation`` for a generate function that names it; any keywords do not, as in slime."""
    return {"evaluation": evaluation} if "evaluation" in inspect.signature(function).parameters else {}


def keywords_of(function: Callable[..., Any], **known: Any) -> dict[str, Any]:
    """Return the keyword arguments among ``known`` that a function takes."""
    parameters = inspect.signature(function).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return known
    return {name: value for name, value in known.items() if name in parameters}
