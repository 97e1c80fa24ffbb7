"""Brings new weights into an engine, and makes sure that they have arrived."""

from __future__ import annotations

from collections.abc import Mapping

from rollfeed.protocols import Engine
from rollfeed.types import WeightProbe, WeightUpdate
from rollfeed.weights.proving import EngineProof


class Publisher:
    """Fits :class:`rollfeed.protocols.WeightPublisher` for one engine.

    Args:
        engine: That takes the weights.
        is_proving: Whether what arrived is compared with what the publisher's probes say.
    """

    def __init__(self, engine: Engine, *, is_proving: bool = True) -> None:
        self._engine = engine
        self._proof = EngineProof(engine) if is_proving else None

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    @property
    def is_proving(self) -> bool:
        return self._proof is not None

    async def publish(self, update: WeightUpdate) -> None:
        await self._engine.apply(update)

    async def prove(self, probe: WeightProbe | None) -> None:
        if self._proof is not None:
            await self._proof.prove(probe, policy_version=self._engine.policy_version)

    def metrics(self) -> Mapping[str, float]:
        return {} if self._proof is None else self._proof.metrics()
