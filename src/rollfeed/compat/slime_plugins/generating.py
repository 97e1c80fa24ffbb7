"""slime's custom generate functions as functions of ours."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, wraps
from typing import Any

from rollfeed.compat.slime_plugins.checking import is_of_miles
from rollfeed.compat.slime_plugins.names.engine_calls import sampling_params
from rollfeed.compat.slime_plugins.names.forms import GenerateFnInput
from rollfeed.compat.slime_plugins.names.sglang_rollout import GenerateState
from rollfeed.compat.slime_plugins.read_back import asked_sample, is_slime_sample, own_sample
from rollfeed.compat.slime_plugins.shared_run import CURRENT, Adapter, SlimeRun, Work, told_of_evaluation
from rollfeed.compat.slime_plugins.slime_paths import GENERATE_PATH
from rollfeed.compat.slime_plugins.supplied import sample_class
from rollfeed.protocols import GenerateFn, RolloutRequest, Services
from rollfeed.sample_builder import SampleBuilder
from rollfeed.types import Sample, SampleStatus


class SlimeGenerate(Adapter):
    """``async def f(args, sample, sampling_params)``, with ``evaluation`` or without, as a ``GenerateFn``."""

    def __init__(self, function: Any, run: SlimeRun, *, key: str) -> None:
        super().__init__(function, run, key=key)
        self._is_of_miles = is_of_miles(function)

    async def __call__(self, request: RolloutRequest, *, services: Services) -> Sequence[Sample]:
        """Return the samples that the function made of an answering."""
        task = asyncio.current_task()
        work = Work(run=self.run, services=services, request=request, step=request.step, task=task)
        self.run.tokenizer = services.tokenizer
        version = services.endpoint.policy_version
        token = CURRENT.set(work)
        try:
            made = await self._answer(asked_sample(request, sample_class()), request)
        except asyncio.CancelledError:
            if task is None or not work.was_aborted or task.uncancel():
                raise
            return [SampleBuilder(replace(request, partial=None)).build(SampleStatus.ABORTED, response="")]
        finally:
            work.task = None
            CURRENT.reset(token)
            for end in work.sessions:
                await end()
        return [self._read(each, request, work, version) for each in (made if isinstance(made, list) else [made])]

    async def _answer(self, sample: Any, request: RolloutRequest) -> Any:
        """Call the function, and return what it returned: a sample, or a list.

        Raises:
            RunFailedError: If it is something else.
        """
        args, params, evaluation = self.run.args, sampling_params(request.params), request.evaluation
        if self._is_of_miles:
            made = await self.call(GenerateFnInput(GenerateState(args), sample, params, evaluation))
            made = getattr(made, "samples", made)
        else:
            made = await self.call(args, sample, params, **told_of_evaluation(self.call, evaluation))
        leaves = made if isinstance(made, list) and made else [made]
        if not all(map(is_slime_sample, leaves)):
            raise self.broke(f"returned {made!r:.80}; it must return a Sample, or a list of at least one")
        return made

    def _read(self, made: Any, request: RolloutRequest, work: Work, version: int) -> Sample:
        try:
            return own_sample(made, request, work.sent, policy_version=version)
        except ValueError as error:
            raise self.broke(f"returned {error}") from None


def by_sample(generate: GenerateFn, run: SlimeRun) -> GenerateFn:
    """Return a generate function that has one of slime answer prompts that name it, and ``generate`` all others."""

    @cache
    def named(path: str) -> SlimeGenerate:
        return SlimeGenerate(run.load(path), run, key=GENERATE_PATH)

    @wraps(generate)
    async def answer(request: RolloutRequest, *, services: Services) -> Sequence[Sample]:
        path = request.prompt.metadata.get(GENERATE_PATH)
        return await (generate if path is None else named(path))(request, services=services)

    return answer
