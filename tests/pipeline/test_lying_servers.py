"""Whole runs beside a server that lies: each lie is counted, none is trained, and the rest is as without it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from rollfeed.config.engine import SGLangSettings
from rollfeed.engine.client import ServerEngine
from rollfeed.engine.dialects import SGLang
from rollfeed.generate import default_generate
from rollfeed.protocols import RolloutRequest, Services
from rollfeed.testing import CharTokenizer, ListSource
from rollfeed.testing.fake_sglang import (
    FakeMode,
    FakeSettings,
    FaultKind,
    Lie,
    ServerFault,
    TimeModelSettings,
    draw_length,
    serve_fake_sglang,
)
from rollfeed.testing.fake_sglang.tokens import Response
from rollfeed.testing.virtual_loop import run_in_virtual_time
from rollfeed.types import Correct, Prompt, Rollout, Sample, TrainBatch, Verdict

MODEL = TimeModelSettings(num_slots=64, median_length=40.0, sigma_between=0.4, sigma_within=0.4, max_length=200)
NOT_JSON = {Lie.NAN_LOGPROB, Lie.DEEP_JSON, Lie.COMPRESSED_BODY}
NOT_HTTP = {Lie.ENDLESS_BODY, Lie.LONG_BODY, Lie.PROVISIONAL_REPLIES}
HARMLESS = {Lie.OTHER_TEXT, Lie.NO_TEXT}
"""What they say is not read."""
NUM_HONEST = 4
"""Steps at the end."""
MODES = {
    "sync": {"deterministic": True},
    "partial": {"over_sampling_batch_size": 8},
    "async": {"max_staleness": 2},
}


class LengthScorer:
    """Reward is the length of a response."""

    async def score(self, rollouts: Sequence[Rollout], prompt: Prompt) -> list[Verdict]:
        return [Verdict(reward=float(each.samples[-1].response_length), correct=Correct.YES) for each in rollouts]

    def scores_alone(self, rollout: Rollout, prompt: Prompt) -> bool:
        return True


class Run:
    """The batches of a run, what its client counted, and how often the second of its servers lied."""

    def __init__(self) -> None:
        self.batches: list[TrainBatch] = []
        self.metrics: dict[str, float] = {}
        self.told: Counter[str] = Counter()
        self.wanted: defaultdict[int, set[int]] = defaultdict(set)
        """Of each rollout, the lengths that a server answers its seeds with: one a step in which it was begun."""


def run(make_rollouts: Callable[..., Any], mode: str, *, lies: Sequence[Lie], steps: int, **limits: Any) -> Run:
    made = Run()

    async def generate(request: RolloutRequest, *, services: Services) -> list[Sample]:
        assert request.params.seed is not None
        length = draw_length(MODEL, request.prompt.token_ids, request.params.seed & 0x7FFFFFFF)
        made.wanted[request.rollout_id].add(length)
        return await default_generate(request, services=services)

    async def main() -> None:
        settings = FakeSettings(mode=FakeMode.TIME_MODEL, time_model=MODEL, num_workers=2, keep_requests=0)
        async with serve_fake_sglang(settings) as fakes:
            for number, lie in enumerate(lies):
                fakes.servers[1].add_fault(ServerFault(kind=FaultKind.LIE, lie=lie, seed=number, **limits))
            asked = SGLangSettings(workers=fakes.addresses, routing="round_robin", concurrency=64)
            engine = ServerEngine(SGLang(asked), context_length=4096, tokenizer=CharTokenizer(), vocab_size=60_000)
            async with make_rollouts(
                engine,
                source=ListSource([f"prompt {number}" for number in range(10_000)]),
                scorer=LengthScorer(),
                generate_fn=generate,
                mode=mode,
                max_response_len=300,
                n_samples_per_prompt=4,
                **MODES[mode],
            ) as rollouts:
                for _ in range(steps):
                    made.batches.append(await rollouts.generate_batch())
                await fakes.clear_faults()
                for _ in range(NUM_HONEST):  # in which all that was answered before has been read
                    made.batches.append(await rollouts.generate_batch())
                made.metrics = dict(engine.metrics())
            made.told.update(fakes.servers[1].faults.fired)

    run_in_virtual_time(main())
    return made


def assert_true(made: Run) -> None:
    """Every sample is what a server makes of its prompt and seed, to the last token and logprob."""
    for batch in made.batches:
        for sample in batch.samples:
            ids = sample.response_token_ids
            length = len(ids)
            assert length in made.wanted[sample.rollout_id]
            expected = Response.of(length).output(0, length)
            assert ids.tolist() == [int(each) for part in expected.ids for each in bytes(part).split(b",") if each]
            told = [each for part in expected.triples for each in bytes(part).strip(b"[],").split(b"],[")]
            logprobs = [float(each.split(b",")[0]) for each in told if each]
            np.testing.assert_array_equal(sample.logprobs, np.array(logprobs, np.float32))
            assert sample.response == CharTokenizer().decode(ids, skip_special_tokens=True)
            assert {span.policy_version for span in sample.version_spans} == {0}


def assert_counted(made: Run) -> None:
    kinds = {"broken_replies": NOT_JSON, "connection_failures": NOT_HTTP}
    kinds["rejected_replies"] = set(Lie) - NOT_JSON - NOT_HTTP - HARMLESS
    told = {counter: sum(made.told[lie] for lie in lies) for counter, lies in kinds.items()}
    assert told == {counter: made.metrics[counter] for counter in kinds}


def same(first: TrainBatch, second: TrainBatch) -> bool:
    return all(
        np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.logprobs, b.logprobs) and a.reward == b.reward
        for a, b in zip(first.samples, second.samples, strict=True)
    )


def check_run(make_rollouts: Any, mode: str, *, steps: int, **limits: Any) -> Run:
    made = run(make_rollouts, mode, lies=list(Lie), steps=steps, **limits)
    assert set(made.told) == set(Lie)
    assert_true(made)
    assert_counted(made)
    if mode == "sync":
        honest = run(make_rollouts, mode, lies=[], steps=steps)
        assert len(made.batches) == len(honest.batches) == steps + NUM_HONEST
        assert all(map(same, made.batches, honest.batches))
    return made


@pytest.mark.parametrize("mode", list(MODES))
def test_a_run_counts_every_lie_and_trains_none(make_rollouts: Any, mode: str) -> None:
    check_run(make_rollouts, mode, steps=6, times=1)


@pytest.mark.soak
@pytest.mark.parametrize("mode", list(MODES))
def test_thirty_steps_count_every_lie_and_train_none(make_rollouts: Any, mode: str) -> None:
    made = check_run(make_rollouts, mode, steps=30, probability=0.02)
    assert made.told.total() > 60
