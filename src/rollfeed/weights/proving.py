"""Proves, publish after publish, that every server of an engine has the publisher's weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rollfeed.errors import EngineProtocolError
from rollfeed.protocols import Engine
from rollfeed.types import PUBLISHED, WeightProbe
from rollfeed.weights.proof import Comparison, Scores, compare

_log = logging.getLogger(__name__)

_LARGEST_DIFFERENCE = {"fp32": 0.02}
_LARGEST_DIFFERENCE_OF_OTHERS = 1.0
"""Nats a token, between engine and publisher of one version: above, they are two models."""


@dataclass(slots=True)
class _Held:
    """What a server is compared with, its weights taken to be held in one type.

    Small lies add up since the start. One that is new, among changes that have arrived, shows best since the last
    version that was proved.
    """

    start: Scores
    proved: Scores
    last: Comparison | None = None
    """Since the last version that was proved."""

    def take(self, now: Scores) -> Comparison:
        """Return the comparison that tells most: one that refutes, or the newest."""
        since_start = compare(self.start, now)
        self.last = compare(self.proved, now)
        if since_start.is_refuted and not self.last.is_refuted:
            return since_start
        if self.last.is_proved and not since_start.is_refuted:
            self.proved = now
        return self.last


@dataclass(slots=True)
class _Server:
    texts: tuple[NDArray[np.int32], ...]
    by_type: dict[str, _Held] = field(default_factory=dict)


class EngineProof:
    """Compares what one engine says of a few texts with what its publisher says; see docs/weights.md."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._servers: dict[str, _Server] = {}
        self._metrics: dict[str, float] = {}
        self._has_told = False

    def metrics(self) -> Mapping[str, float]:
        return self._metrics

    async def prove(self, probe: WeightProbe | None, *, policy_version: int) -> None:
        """Compare; see :class:`rollfeed.protocols.WeightPublisher`."""
        if probe is None:
            self._tell("nothing is known of what they should say: put a probe beside them (docs/weights.md)")
            return
        began = time.perf_counter()
        scored = await self._engine.score(probe.texts)
        if lost := sorted(name for name in self._servers.keys() - scored.keys() if not scored):
            raise EngineProtocolError(f"{lost[0]}: it scores texts no more, so that its weights cannot be proved")
        if not scored:
            self._tell("the engine does not score texts")
            return
        told = [self._of_server(name, engine_N, probe, policy_version) for name, engine_N in scored.items()]
        if compared := [each for each in told if each is not None]:
            self._metrics = {
                #: weights/proof_slope: change of the engine over the expected one; 0 without the update
                "weights/proof_slope": min(each.slope for each in compared),
                #: weights/proof_slope_error: standard error of the slope, the largest
                "weights/proof_slope_error": max(min(each.slope_error, 1e9) for each in compared),
                #: weights/proof_change: change that the publisher expects, in nats a token
                "weights/proof_change": compared[0].change,
                #: weights/proof_residual: what of the change is not the expected one, in nats a token, the largest
                "weights/proof_residual": max(each.residual for each in compared),
                #: weights/proof_noise: noise of the engine's log-probabilities, the largest
                "weights/proof_noise": max(each.noise for each in compared),
            }
        #: perf/proof_seconds: seconds that the proof of the weights took
        self._metrics["perf/proof_seconds"] = probe.seconds + time.perf_counter() - began

    def _of_server(
        self, name: str, engine_N: NDArray[np.float64], probe: WeightProbe, policy_version: int
    ) -> Comparison | None:
        now = {
            kind: Scores(policy_version=policy_version, engine_N=engine_N, publisher_N=publisher_N)
            for kind, publisher_N in probe.logprobs.items()
        }
        server = self._servers.get(name)
        if server is None or not _are_equal(server.texts, probe.texts):
            self._check_base(name, min(now.values(), key=lambda scores: scores.noise))
            held = {kind: _Held(scores, scores) for kind, scores in now.items()}
            self._servers[name] = _Server(probe.texts, held)
            return None
        found = {kind: held.take(now[kind]) for kind, held in server.by_type.items() if kind in now}
        possible = {kind: each for kind, each in found.items() if not each.is_refuted}
        if not possible:
            nearest = min(found, key=lambda kind: found[kind].residual)
            as_held = "" if nearest == PUBLISHED else f" (weights as {nearest})"
            raise EngineProtocolError(
                f"{name}: version {policy_version} is not what it has: {found[nearest]}{as_held}; it answers "
                "with other weights than were published, see docs/weights.md"
            )
        # What it can no longer be, it is not later on either.
        server.by_type = {kind: server.by_type[kind] for kind in possible}
        return min(possible.values(), key=lambda each: each.residual)

    def _check_base(self, name: str, base: Scores) -> None:
        largest = _LARGEST_DIFFERENCE.get(self._engine.precision, _LARGEST_DIFFERENCE_OF_OTHERS)
        if base.noise > largest:
            raise EngineProtocolError(
                f"{name}: version {base.policy_version} is not what it has: its log-probabilities of "
                f"{len(base.engine_N)} tokens differ from the publisher's by {base.noise:.2g} nats a token, where its "
                f"precision explains {largest:g}; see docs/weights.md"
            )

    def _tell(self, why: str) -> None:
        if not self._has_told:
            self._has_told = True
            _log.warning("weights not proved: %s", why)


def _are_equal(texts: Sequence[NDArray[np.int32]], others: Sequence[NDArray[np.int32]]) -> bool:
    return len(texts) == len(others) and all(map(np.array_equal, texts, others))
