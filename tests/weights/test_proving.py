"""The proof of one engine over many publishes: what it says, what it compares with, when it fails."""

import logging
from collections.abc import Mapping

import numpy as np
import pytest

from rollfeed.errors import EngineProtocolError
from rollfeed.testing import ScriptedEngine
from rollfeed.types import PUBLISHED, WeightProbe
from rollfeed.weights import EngineProof

TEXTS = tuple(np.arange(20 * number, 20 * number + 20, dtype=np.int32) for number in range(10))
N = 190


class ScoringEngine(ScriptedEngine):
    """Says what it is told to, under the names of servers."""

    def __init__(self, precision: str = "unknown") -> None:
        super().__init__()
        self.precision = precision
        self.says: Mapping[str, np.ndarray] = {}

    async def score(self, texts):
        assert len(texts) == len(TEXTS)
        return self.says


def probe(logprobs_N, texts=TEXTS, **others) -> WeightProbe:
    return WeightProbe(texts=texts, logprobs={PUBLISHED: logprobs_N, **others})


def made_changes(seed: int = 0):
    rng = np.random.default_rng(seed)
    logprobs_N = rng.normal(-5.0, 0.5, N)
    while True:
        yield logprobs_N
        logprobs_N = logprobs_N + 0.01 * rng.normal(size=N)


async def test_servers_that_follow_are_proved_and_the_figures_are_metrics() -> None:
    engine = ScoringEngine()
    proof = EngineProof(engine)
    for version, logprobs_N in zip(range(5), made_changes(), strict=False):
        engine.says = {"http://a": logprobs_N + 1e-6, "http://b": logprobs_N - 1e-6}
        await proof.prove(probe(logprobs_N), policy_version=version)
        if version == 0:
            assert not any("slope" in name for name in proof.metrics())
    assert proof.metrics()["weights/proof_slope"] == pytest.approx(1.0, abs=1e-3)
    assert proof.metrics()["weights/proof_residual"] < 1e-5
    assert proof.metrics()["perf/proof_seconds"] > 0.0


async def test_a_server_that_keeps_its_weights_fails_the_publish_and_is_named_with_figures() -> None:
    engine = ScoringEngine()
    proof = EngineProof(engine)
    changes = made_changes()
    old_N, new_N = next(changes), next(changes)
    engine.says = {"http://a": old_N, "http://b": old_N}
    await proof.prove(probe(old_N), policy_version=3)
    engine.says = {"http://a": new_N, "http://b": old_N}
    with pytest.raises(EngineProtocolError) as caught:
        await proof.prove(probe(new_N), policy_version=4)
    message = str(caught.value)
    assert message.startswith("http://b: version 4 is not what it has: of the change since version 3 (0.0")
    assert "nats a token over 190 tokens) it has made 0 +- " in message
    assert "\n" not in message


async def test_a_server_that_stops_following_after_many_publishes_is_found_at_once() -> None:
    engine = ScoringEngine()
    proof = EngineProof(engine)
    changes = made_changes()
    for version in range(50):
        logprobs_N = next(changes)
        engine.says = {"http://a": logprobs_N + 1e-6 * (version % 3)}
        await proof.prove(probe(logprobs_N), policy_version=version)
    with pytest.raises(EngineProtocolError, match="since version 49"):
        await proof.prove(probe(next(changes)), policy_version=50)


async def test_a_small_part_that_stays_behind_is_found_when_it_has_added_up() -> None:
    engine, rng = ScoringEngine(), np.random.default_rng(0)
    proof = EngineProof(engine)
    behind_N = 0.001 * np.sin(np.arange(N))
    found = None
    for version, logprobs_N in zip(range(200), made_changes(), strict=False):
        engine.says = {"http://a": logprobs_N + version * behind_N + 0.01 * rng.normal(size=N)}
        try:
            await proof.prove(probe(logprobs_N), policy_version=version)
        except EngineProtocolError as error:
            found = str(error)
            break
    assert 15 < version < 100
    assert "since version 0" in found


async def test_weights_may_be_held_in_any_of_the_types_and_are_then_held_so_for_good() -> None:
    engine = ScoringEngine()
    proof = EngineProof(engine)
    changes, coarse = made_changes(0), made_changes(1)
    shift_N = next(coarse) - next(changes)
    for version in range(3):
        fine_N, coarse_N = next(changes), next(coarse) - shift_N
        engine.says = {"http://a": coarse_N}
        await proof.prove(probe(fine_N, bfloat16=coarse_N), policy_version=version)
    engine.says = {"http://a": fine_N}
    with pytest.raises(EngineProtocolError, match=r"weights as bfloat16"):
        await proof.prove(probe(fine_N, bfloat16=coarse_N), policy_version=3)


async def test_other_texts_are_a_new_beginning() -> None:
    engine = ScoringEngine()
    proof = EngineProof(engine)
    changes = made_changes()
    old_N = next(changes)
    engine.says = {"http://a": old_N}
    await proof.prove(probe(old_N), policy_version=0)
    others = tuple(text + 1 for text in TEXTS)
    engine.says = {"http://a": next(changes)}
    await proof.prove(probe(engine.says["http://a"], texts=others), policy_version=1)


@pytest.mark.parametrize(("precision", "difference"), [("fp32", 0.05), ("unknown", 2.0)])
async def test_two_different_models_are_told_apart_at_the_first_comparison(precision, difference) -> None:
    engine = ScoringEngine(precision)
    logprobs_N = next(made_changes())
    engine.says = {"http://a": logprobs_N - difference}
    with pytest.raises(EngineProtocolError, match=r"http://a: version 7 is not .* differ from the publis"):
        await EngineProof(engine).prove(probe(logprobs_N), policy_version=7)


@pytest.mark.parametrize("known", [None, probe(next(made_changes()))])
async def test_weights_that_are_not_proved_are_told_of_once(known, caplog) -> None:
    proof = EngineProof(ScoringEngine())
    with caplog.at_level(logging.WARNING):
        for version in range(3):
            await proof.prove(known, policy_version=version)
    (told,) = caplog.messages
    assert told.startswith("weights not proved: ")


async def test_a_server_that_scored_and_does_not_any_more_fails_the_publish() -> None:
    engine = ScoringEngine()
    proof = EngineProof(engine)
    engine.says = {"http://a": next(made_changes())}
    await proof.prove(probe(engine.says["http://a"]), policy_version=0)
    engine.says = {}
    with pytest.raises(EngineProtocolError, match="http://a: it scores texts no more"):
        await proof.prove(probe(next(made_changes())), policy_version=1)
