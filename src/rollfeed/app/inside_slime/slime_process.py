"""Everything that lives in a process of slime's or miles's between two calls, and ends with it."""

from __future__ import annotations

import asyncio
import atexit
import importlib
import sys
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from functools import cache
from typing import Any, TypeVar

from rollfeed.app.inside_slime.slime_eval import evaluate
from rollfeed.app.inside_slime.slime_job import SlimeJob, SlimeWork, read_job
from rollfeed.app.inside_slime.slime_steps import make_step
from rollfeed.app.model import load_model, vocab_size_of
from rollfeed.app.rewards import RewardServices, reward_hub
from rollfeed.base.loop_thread import LoopThread
from rollfeed.compat.slime_plugins.shared_run import SlimeRun, begin
from rollfeed.compat.slime_plugins.supplied import PACKAGES, is_supplied, supply_names
from rollfeed.config import PluginSettings
from rollfeed.config.model import ModelSettings
from rollfeed.engine.client import ServerEngine
from rollfeed.engine.dialects import SGLang
from rollfeed.errors import ConfigError, RunFailedError

T = TypeVar("T")
_END_SECONDS = 10.0


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Make a step, or an evaluation, for a process of slime's or miles's; called in one of its threads.

    Args:
        args: Its namespace.
        rollout_id: The number of the step.
        data_source: Has ``get_samples(count)`` and, for ``--partial-rollout``, ``add_samples(groups)``.
        evaluation: Whether to answer ``args.eval_datasets``.

    Returns:
        ``RolloutFnTrainOutput`` or ``RolloutFnEvalOutput`` of the process's package, with the groups of samples that
        the data source gave; the list or the dictionary alone where an older package has no such classes.

    Raises:
        ConfigError: If an argument is wrong or not served; nothing has been asked then.
        EngineError: If the servers are not there or do not answer.
        RunFailedError: If the step cannot be made; its prompts come again in the next call.
    """
    _PROCESS.check_caller()
    package = _package()
    run = _runner(package)
    sample_class = importlib.import_module(f"{package}.utils.types").Sample
    job = read_job(args, sample_class=sample_class)
    if evaluation and getattr(args, "group_rm", False):
        raise ConfigError("--group-rm: evaluations score each answer: remove it, or the evaluation")
    return run(_PROCESS.call(job, rollout_id, data_source, package=package, evaluation=evaluation))


class _Process:
    """Holds the connections to the servers, what scores, and groups that are to be answered again."""

    def __init__(self) -> None:
        self._opened_for: object = None
        self._work: SlimeWork | None = None
        self._source: Any = None
        self._waiting: list[list[Any]] = []
        """Groups of that data source."""
        self._stack = AsyncExitStack()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn = asyncio.Lock()

    def check_caller(self) -> None:
        """Raise RunFailedError where the caller would wait for itself."""
        with suppress(RuntimeError):
            if asyncio.get_running_loop() is self._loop:
                raise RunFailedError("generate_rollout is called in the event loop that it needs: call it in a thread")

    async def call(self, job: SlimeJob, rollout_id: int, data_source: Any, *, package: str, evaluation: bool) -> Any:
        self._loop = asyncio.get_running_loop()
        async with self._turn:
            work = await self._open(job, package)
            await work.engine.weights.wake()
            try:
                if evaluation:
                    return await evaluate(work, job, rollout_id)
                source = getattr(data_source, "__self__", data_source)  # a method is another object in every call
                if source is not self._source:
                    self._source = source
                    self._waiting.clear()
                return await make_step(work, job, rollout_id, data_source)
            finally:
                work.engine.weights.rest()

    async def _open(self, job: SlimeJob, package: str) -> SlimeWork:
        """Return what calls work with, made anew where settings of servers or graders are other ones."""
        checkpoint = job.args.hf_checkpoint
        asked = checkpoint, job.engine, job.config.reward, job.config.seed
        if self._work is not None and asked == self._opened_for:
            self._work.run.args, self._work.run.params = job.args, job.config.sampling.params
            return self._work
        await self.close()
        model = load_model(checkpoint, ModelSettings(trust_remote_code=True), with_weights=False)
        servers = job.engine.sglang
        assert servers is not None
        engine = ServerEngine(
            SGLang(servers, with_text=True),  # as slime takes it
            context_length=job.engine.context_length,
            tokenizer=model.tokenizer,
            vocab_size=vocab_size_of(model.checkpoint),
        )
        services = RewardServices(job.config.reward, rm_types=[job.config.reward.rm_type])
        hub = reward_hub(job.config.reward, PluginSettings(), services, seed=job.config.seed)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(services)
            await stack.enter_async_context(engine)
            self._stack = stack.pop_all()
        run = begin(SlimeRun(args=job.args, params=job.config.sampling.params, tokenizer=model.tokenizer, hub=hub))
        self._opened_for = asked
        self._work = SlimeWork(engine, model.tokenizer, services, hub, run, package, self._waiting)
        return self._work

    async def close(self) -> None:
        """End connections and workers."""
        self._work = None
        await self._stack.aclose()

    def end(self) -> None:
        if self._work is not None and self._loop is not None and self._loop.is_running():
            with suppress(Exception):
                asyncio.run_coroutine_threadsafe(self.close(), self._loop).result(_END_SECONDS)


_PROCESS = _Process()


@atexit.register
def end() -> None:
    """Close connections and workers; a later call opens them again."""
    _PROCESS.end()


def _package() -> str:
    """Return whose process this is; names of slime's are supplied where neither package is there."""
    supply_names()
    return next((name for name in PACKAGES if f"{name}.utils.types" in sys.modules and not is_supplied(name)), "slime")


def _runner(package: str) -> Callable[[Coroutine[Any, Any, T]], T]:
    """Return what runs coroutines: in the loop of the package, where its own functions run, too."""
    if not is_supplied(package):
        run: Callable[[Coroutine[Any, Any, T]], T] = importlib.import_module(f"{package}.utils.async_utils").run
        return run
    return _own_loop().call


@cache
def _own_loop() -> LoopThread:
    return LoopThread("rollfeed")
