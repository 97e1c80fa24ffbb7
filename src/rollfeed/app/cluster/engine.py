"""The engines of all rollout workers as one, for what the run's process asks of an engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfeed.app.cluster.orders import AbortRequests
from rollfeed.app.cluster.worker_places import RolloutWorkers, WorkerPlace
from rollfeed.cluster import HostDiedError
from rollfeed.errors import EngineUnavailableError, RollfeedError
from rollfeed.protocols import Engine
from rollfeed.types import Completion, EngineLoad, Picture, SamplingParams, TensorUpdate, WeightUpdate

_log = logging.getLogger(__name__)
_MAXIMA = frozenset({"kv_use", "weights_prepare_seconds", "weights_pause_seconds"})
"""Of the fullest server, and of the last update of all."""


class ClusterEngine(Engine):
    """Weights, aborts and single requests for all workers; groups go to them by ``RemoteRunner``.

    It starts and ends ``workers``; ``like`` is what a worker's engine is like, and is not started here.
    """

    def __init__(self, workers: RolloutWorkers, like: Engine) -> None:
        self.workers = workers
        self.precision = like.precision
        self.max_running_requests = like.max_running_requests
        self.context_length = like.context_length
        self.vocab_size = like.vocab_size
        self.is_exact = like.is_exact

    async def __aenter__(self) -> ClusterEngine:
        await self.workers.open()
        known = [each.facts for each in self.workers.live if each.facts is not None]
        self.precision, self.is_exact = known[0].precision, all(each.is_exact for each in known)
        self.max_running_requests = sum(each.max_running_requests for each in known)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.workers.close()

    @property
    def policy_version(self) -> int:
        """The version that all workers have."""
        return self.workers.policy_version

    async def generate(
        self, token_ids: NDArray[np.int32], params: SamplingParams, *, request_id: str, images: Sequence[Picture] = ()
    ) -> Completion:
        """Sample one response at the least busy worker; at another one where that dies."""
        while True:
            place = await self.workers.pick()
            try:
                made: Completion = await self.workers.call(
                    place, "generate", np.asarray(token_ids, np.int32), params, request_id, tuple(images)
                )
                return made
            except HostDiedError:
                continue

    async def abort(self, request_id: str | None = None) -> None:
        for place in self.workers.live:
            place.order(AbortRequests(request_id))

    async def pause(self) -> None:
        await self._ask_all("pause")

    async def resume(self) -> None:
        await self._ask_all("resume")

    async def apply(self, update: WeightUpdate) -> None:
        """Have all workers take new weights; one that does not is replaced by another, which gets them as it joins."""
        workers = self.workers
        async with workers.updating:
            before = workers.update, workers.policy_version
            shared = await asyncio.to_thread(workers.share, _on_cpu(update))
            asked = [each for each in workers.places if each.is_live]
            outcomes = await asyncio.gather(
                *(workers.call(place, "apply", shared) for place in asked), return_exceptions=True
            )
            errors = [each for each in outcomes if isinstance(each, BaseException)]
            refused = [each for each in errors if not isinstance(each, HostDiedError)]
            if refused and len(errors) == len(asked):
                workers.update, workers.policy_version = before
                raise refused[0]
            workers.update, workers.policy_version = shared, update.policy_version
            for place, outcome in zip(asked, outcomes, strict=True):
                if isinstance(outcome, BaseException):
                    _log.warning("cluster: rollout worker %d has no new weights: %s", place.number, outcome)
                    workers.drop(place)
                else:
                    place.policy_version = update.policy_version
        await workers.pick()

    async def score(self, texts: Sequence[NDArray[np.int32]]) -> Mapping[str, NDArray[np.float64]]:
        told: dict[str, NDArray[np.float64]] = {}
        for place, scored in await self._ask_all("score", list(texts)):
            told |= {f"worker {place.number}: {name}": logprobs for name, logprobs in scored.items()}
        return told

    async def load(self) -> EngineLoad:
        loads = [load for _, load in await self._ask_all("load")]
        return EngineLoad(sum(each.running for each in loads), sum(each.waiting for each in loads))

    async def health(self) -> None:
        if not await self._ask_all("health"):
            raise EngineUnavailableError("no rollout worker is left")

    def metrics(self) -> Mapping[str, float]:
        """Return what the workers' engines count, as if they were one, and how many workers there are."""
        workers = self.workers
        return {
            **joined([workers.lost_counts, *(place.metrics for place in workers.places)]),
            #: engine/rollout_workers: workers of `[cluster]` that may have work
            "rollout_workers": float(len(workers.live)),
            #: engine/lost_rollout_workers: workers that have died since the start, in whose places others were started
            "lost_rollout_workers": float(workers.num_lost),
            #: engine/groups_run_again: groups that were answered again because their worker had died
            "groups_run_again": float(workers.num_run_again),
        }

    async def _ask_all(self, method: str, *args: Any) -> list[tuple[WorkerPlace, Any]]:
        """Return what live workers answer; those that die are left out."""
        places = self.workers.live
        asked = (self.workers.call(place, method, *args) for place in places)
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, HostDiedError):
                raise outcome
        answered = zip(places, outcomes, strict=True)
        return [(place, outcome) for place, outcome in answered if not isinstance(outcome, RollfeedError)]


def joined(told: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of several engines as those of one: a maximum of each stays one, the rest adds up."""
    names = dict.fromkeys(name for each in told for name in each)
    all_of = {name: (max if name in _MAXIMA else sum)(each.get(name, 0.0) for each in told) for name in names}
    if "stale_cache_share" in all_of:
        all_of["stale_cache_share"] = all_of["stale_cache_tokens"] / max(1.0, all_of["sampled_tokens"])
    return all_of


def _on_cpu(update: WeightUpdate) -> WeightUpdate:
    """Return an update as it can be sent to other machines."""
    if not isinstance(update, TensorUpdate):
        return update
    tensors = {
        name: each.detach().cpu() if hasattr(each, "detach") else np.asarray(each)
        for name, each in update.tensors.items()
    }
    return replace(update, tensors=tensors)
