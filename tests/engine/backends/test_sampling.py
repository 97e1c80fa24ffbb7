"""Axes: M rows, V vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import chisquare, kstest
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rollfeed.engine.backends.architecture import Architecture
from rollfeed.engine.backends.native.model import NativeModel
from rollfeed.engine.backends.sampling import Sampler, TorchDraw, uniforms
from rollfeed.types import SamplingParams

NUM_DRAWS = 20_000
SEEN = np.array([3, 5, 600], np.int32)


class Samplers:
    """Makes samplers whose tokens are drawn by torch or by the native kernels."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._models: list[NativeModel] = []

    def make(self, *, num_rows: int, vocab_size: int) -> Sampler:
        device = torch.device("cpu")
        if self._kind == "torch":
            draw: Any = TorchDraw(num_rows=num_rows, vocab_size=vocab_size, device=device)
        else:
            draw = self._native(vocab_size).draw
        return Sampler(num_rows=num_rows, vocab_size=vocab_size, device=device, draw=draw)

    def _native(self, vocab_size: int) -> NativeModel:
        config = {"model_type": "llama", "vocab_size": vocab_size, "hidden_size": 4, "intermediate_size": 4}
        architecture = Architecture.from_config({**config, "num_hidden_layers": 1, "num_attention_heads": 1})
        model = NativeModel(architecture, num_slots=1, capacity=16, max_rows=1, max_threads=2)
        self._models.append(model)
        return model

    def close(self) -> None:
        for model in self._models:
            model.close()


@pytest.fixture(params=["torch", "native"])
def samplers(request: pytest.FixtureRequest) -> Iterator[Samplers]:
    made = Samplers(request.param)
    yield made
    made.close()


def logits_of(vocab_size: int) -> torch.Tensor:
    return 2.0 * torch.randn(vocab_size, generator=torch.Generator().manual_seed(1))


def expected_probabilities(logits_V: torch.Tensor, params: SamplingParams) -> NDArray[np.float64]:
    """What transformers' own processors make of the logits."""
    processors: list[Any] = [RepetitionPenaltyLogitsProcessor(params.repetition_penalty)]
    if params.temperature not in (0.0, 1.0):
        processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k != -1:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        processors.append(TopPLogitsWarper(params.top_p))
    scores = logits_V[None].clone()
    for processor in processors:
        scores = processor(torch.from_numpy(SEEN.astype(np.int64))[None], scores)
    return scores[0].double().softmax(dim=-1).numpy()


def draw(
    samplers: Samplers, logits_V: torch.Tensor, params: SamplingParams, num_rows: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    sampler = samplers.make(num_rows=num_rows, vocab_size=len(logits_V))
    for row in range(num_rows):
        sampler.assign(row, params, seed=row, prompt_ids=SEEN, stop_ids=())
    logits_MV = logits_V.repeat(num_rows, 1)
    draws = sampler.sample(logits_MV, np.arange(num_rows), np.zeros(num_rows, np.int64))
    return draws.token_ids, draws.logprobs


def frequencies_agree(token_ids: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
    """Return the p-value; what is expected fewer than 5 times is counted together."""
    expected = probabilities * len(token_ids)
    observed = np.bincount(token_ids, minlength=len(probabilities)).astype(np.float64)
    often = expected >= 5
    rest = float(expected[~often].sum())
    pooled_expected = np.append(expected[often], rest) if rest > 0 else expected[often]
    pooled_observed = np.append(observed[often], observed[~often].sum()) if rest > 0 else observed[often]
    return float(chisquare(pooled_observed, pooled_expected).pvalue)


SETTINGS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "top_k_then_top_p": {"top_k": 20, "top_p": 0.7},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "all": {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.3},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_come_as_often_as_the_settings_say(samplers: Samplers, name: str) -> None:
    params = SamplingParams(max_new_tokens=1, **SETTINGS[name])
    logits_V = logits_of(700)
    probabilities = expected_probabilities(logits_V, params)
    token_ids, _ = draw(samplers, logits_V, params, NUM_DRAWS)
    assert (probabilities[token_ids] > 0).all()
    assert frequencies_agree(token_ids, probabilities) > 1e-3


@pytest.mark.parametrize("name", SETTINGS)
def test_logprobs_are_those_of_the_distribution_drawn_from(samplers: Samplers, name: str) -> None:
    params = SamplingParams(max_new_tokens=1, **SETTINGS[name])
    logits_V = logits_of(700)
    token_ids, logprobs = draw(samplers, logits_V, params, 500)
    expected = np.log(expected_probabilities(logits_V, params)[token_ids])
    np.testing.assert_allclose(logprobs, expected, atol=2e-6)


@pytest.mark.parametrize("vocab_size", [2, 5, 256, 257, 600])
def test_any_size_of_vocabulary_is_sampled_over_its_whole_width(samplers: Samplers, vocab_size: int) -> None:
    token_ids, _ = draw(samplers, torch.zeros(vocab_size), SamplingParams(max_new_tokens=1), 4000)
    assert frequencies_agree(token_ids, np.full(vocab_size, 1.0 / vocab_size)) > 1e-3


def test_top_p_that_needs_nearly_the_whole_vocabulary_is_exact(samplers: Samplers) -> None:
    params = SamplingParams(max_new_tokens=1, top_p=0.995)
    logits_V = 0.1 * logits_of(6000)
    probabilities = expected_probabilities(logits_V, params)
    token_ids, logprobs = draw(samplers, logits_V, params, 300)
    np.testing.assert_allclose(logprobs, np.log(probabilities[token_ids]), atol=2e-6)


def test_temperature_0_takes_the_likeliest_token_with_its_untempered_logprob(samplers: Samplers) -> None:
    logits_V = logits_of(300)
    token_ids, logprobs = draw(
        samplers, logits_V, SamplingParams(max_new_tokens=1, temperature=0.0, top_k=2, top_p=0.3), 3
    )
    best = int(logits_V.argmax())
    assert token_ids.tolist() == [best] * 3
    np.testing.assert_allclose(logprobs, float(logits_V.log_softmax(dim=-1)[best]), atol=1e-6)


def test_rows_with_different_settings_do_not_touch_each_other(samplers: Samplers) -> None:
    logits_V = logits_of(700)
    settings = [SamplingParams(max_new_tokens=1, **changes) for changes in SETTINGS.values()]
    settings.append(SamplingParams(max_new_tokens=1, temperature=0.0))
    sampler = samplers.make(num_rows=len(settings), vocab_size=700)
    for row, params in enumerate(settings):
        sampler.assign(row, params, seed=row, prompt_ids=SEEN, stop_ids=())
    rows = np.arange(len(settings))[::-1].copy()
    together = sampler.sample(logits_V.repeat(len(rows), 1), rows, np.zeros(len(rows), np.int64))
    for index, row in enumerate(rows):
        single = samplers.make(num_rows=1, vocab_size=700)
        single.assign(0, settings[row], seed=int(row), prompt_ids=SEEN, stop_ids=())
        alone = single.sample(logits_V[None].clone(), np.zeros(1, np.int64), np.zeros(1, np.int64))
        assert alone.token_ids[0] == together.token_ids[index]
        np.testing.assert_allclose(alone.logprobs[0], together.logprobs[index], atol=1e-6)


def test_stop_ids_are_held_back_before_min_new_tokens(samplers: Samplers) -> None:
    logits_V = torch.zeros(10)
    logits_V[4] = 50.0
    params = SamplingParams(max_new_tokens=9, min_new_tokens=2)
    sampler = samplers.make(num_rows=1, vocab_size=10)
    sampler.assign(0, params, seed=0, prompt_ids=SEEN[:1], stop_ids={4, 99})
    drawn = [sampler.sample(logits_V[None].clone(), np.zeros(1, np.int64), np.array([n])) for n in range(3)]
    assert drawn[0].token_ids[0] != 4
    assert drawn[1].token_ids[0] != 4
    np.testing.assert_allclose(drawn[0].logprobs, np.log(1 / 9), atol=1e-6)
    assert drawn[2].token_ids[0] == 4


def test_what_a_token_was_drawn_from_is_returned_where_it_is_asked_for(samplers: Samplers) -> None:
    logits_V = logits_of(700)
    restricted = {"top_p": 0.6, "top_k": 50, "temperature": 0.8, "min_new_tokens": 3}
    asks = [SamplingParams(max_new_tokens=9, **restricted, return_sampling_mask=asked) for asked in (True, False, True)]
    sampler, without = (samplers.make(num_rows=3, vocab_size=700) for _ in range(2))
    best = int(logits_V.argmax())
    for row, params in enumerate(asks):
        sampler.assign(row, params, seed=row, prompt_ids=SEEN, stop_ids={best})
        without.assign(row, replace(params, return_sampling_mask=False), seed=row, prompt_ids=SEEN, stop_ids={best})
    rows, none_yet = np.arange(3), np.zeros(3, np.int64)
    draws = sampler.sample(logits_V.repeat(3, 1), rows, none_yet)
    plain = without.sample(logits_V.repeat(3, 1), rows, none_yet)
    assert draws.token_ids.tolist() == plain.token_ids.tolist()
    assert draws.logprobs[1] == plain.logprobs[1]
    np.testing.assert_allclose(draws.logprobs, plain.logprobs, atol=1e-5)
    assert not len(draws.kept[1])
    assert plain.kept == ()
    for row in (0, 2):
        kept = draws.kept[row]
        assert best not in kept
        assert 1 < len(kept) <= 50
        among = (logits_V / 0.8)[kept].double().log_softmax(-1).numpy()
        np.testing.assert_allclose(draws.logprobs[row], among[kept == draws.token_ids[row]], atol=1e-5)


def test_the_likeliest_tokens_are_told_of_the_distribution_before_top_k_and_change_no_draw(samplers: Samplers) -> None:
    logits_V = logits_of(700)
    asks = [({"temperature": 0.8, "top_k": 2}, 3), ({}, 0), ({"temperature": 0.0}, 1), ({"min_new_tokens": 3}, 700)]
    sampler, without = (samplers.make(num_rows=len(asks), vocab_size=700) for _ in range(2))
    best = int(logits_V.argmax())
    for row, (changes, num_tops) in enumerate(asks):
        about = {"seed": row, "prompt_ids": SEEN, "stop_ids": {best}}
        sampler.assign(row, SamplingParams(max_new_tokens=9, **changes), num_tops=num_tops, **about)
        without.assign(row, SamplingParams(max_new_tokens=9, **changes), **about)
    rows, none_yet = np.arange(len(asks)), np.zeros(len(asks), np.int64)
    draws = sampler.sample(logits_V.repeat(len(asks), 1), rows, none_yet)
    plain = without.sample(logits_V.repeat(len(asks), 1), rows, none_yet)
    assert (draws.token_ids.tolist(), draws.logprobs.tolist()) == (plain.token_ids.tolist(), plain.logprobs.tolist())
    assert not plain.tops
    cool, none, greedy, every = draws.tops
    wanted = (logits_V.double() / 0.8).log_softmax(-1)
    assert [token_id for token_id, _ in cool] == wanted.topk(3).indices.tolist()
    np.testing.assert_allclose([logprob for _, logprob in cool], wanted.topk(3).values, atol=1e-5)
    assert list(none) == []
    assert greedy[0] == (draws.token_ids[2], pytest.approx(float(draws.logprobs[2]), abs=1e-5))
    assert len(every) == 699  # but for the one that may not come yet
    assert sum(np.exp(logprob) for _, logprob in every) == pytest.approx(1.0)


def test_the_repetition_penalty_covers_sampled_tokens_too(samplers: Samplers) -> None:
    logits_V = torch.tensor([5.0, 4.0, -1.0])
    params = SamplingParams(max_new_tokens=9, temperature=0.0, repetition_penalty=2.0)
    sampler = samplers.make(num_rows=1, vocab_size=3)
    sampler.assign(0, params, seed=0, prompt_ids=np.array([2], np.int32), stop_ids=())
    drawn = [
        int(sampler.sample(logits_V[None].clone(), np.zeros(1, np.int64), np.array([n])).token_ids[0]) for n in range(2)
    ]
    assert drawn == [0, 1]


def test_logits_that_are_not_numbers_are_reported_for_their_row_only(samplers: Samplers) -> None:
    logits_MV = torch.zeros(3, 300)
    logits_MV[1, 7] = torch.nan
    sampler = samplers.make(num_rows=3, vocab_size=300)
    draws = sampler.sample(logits_MV, np.arange(3), np.zeros(3, np.int64))
    assert draws.finite.tolist() == [True, False, True]
    np.testing.assert_allclose(draws.logprobs[[0, 2]], -np.log(300), atol=1e-6)


def test_tokens_of_probability_zero_are_never_drawn(samplers: Samplers) -> None:
    logits_V = torch.full((600,), -torch.inf)
    logits_V[[0, 299, 511]] = torch.tensor([0.0, -20.0, -30.0])
    token_ids, _ = draw(samplers, logits_V, SamplingParams(max_new_tokens=1), 3000)
    assert set(token_ids.tolist()) <= {0, 299, 511}


def test_uniforms_depend_on_seed_and_counter_only_and_are_uniform() -> None:
    seeds = np.repeat(np.arange(200, dtype=np.uint64), 100)
    counters = np.tile(np.arange(100, dtype=np.uint64), 200)
    values = uniforms(seeds, counters)
    assert ((values >= 0) & (values < 1)).all()
    assert kstest(values, "uniform").pvalue > 1e-3
    grid = values.reshape(200, 100)
    for first, second in ((grid[:, :-1], grid[:, 1:]), (grid[:-1], grid[1:])):
        assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.03
    np.testing.assert_array_equal(uniforms(seeds[::-1].copy(), counters[::-1].copy()), values[::-1])
    assert len(np.unique(values)) == len(values)
