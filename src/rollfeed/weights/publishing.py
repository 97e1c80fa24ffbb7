"""Brings new weights into an engine, and makes sure that they have arrived."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rollfeed.protocols import Engine
from rollfeed.types import WeightProbe, WeightUpdate
from rollfeed.weights.proving import EngineProof


class Publisher:
    """Fits :class:`rollfeed.protocols.WeightPublisher` for one engine.

    With ``is_proving`` what arrived is compared with what the publisher's probes say.
    """

    def __init__(self, engine: Engine, *, is_proving: bool = True) -> None:
        self._engine = engine
        self._seconds: float | None = None
        self._proof = EngineProof(engine) if is_proving else None

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    @property
    def is_proving(self) -> bool:
        return self._proof is not None

    async def publish(self, update: WeightUpdate) -> None:
        began = time.perf_counter()
        await self._engine.apply(update)
        self._seconds = time.perf_counter() - began

    async def prove(self, probe: WeightProbe | None) -> None:
        if self._proof is not None:
            await self._proof.prove(probe, policy_version=self._engine.policy_version)

    def metrics(self) -> Mapping[str, float]:
        proof = {} if self._proof is None else self._proof.metrics()
        #: perf/weights_publish_seconds: from an update's tensors or folder to the last server's word that it has it
        return proof if self._seconds is None else {**proof, "perf/weights_publish_seconds": self._seconds}
