"""Teachers in this process and on servers of ours, against what transformers says of the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from rollfeed.config.teacher import TeacherSettings
from rollfeed.engine.teachers import EmbeddedTeacher, ServedTeacher
from rollfeed.errors import EngineError
from rollfeed.prompts import load_tokenizer
from rollfeed.protocols import Teacher
from rollfeed.testing import CharTokenizer, sample_of
from rollfeed.types import Picture, Sample


@pytest.fixture
def samples() -> list[Sample]:
    random = np.random.default_rng(3)
    made = [sample_of(random.integers(40, 90, 4), random.integers(40, 90, length)) for length in (1, 5, 17)]
    loss_mask = np.array([1.0, 0.0, 1.0, 1.0, 0.0], np.float32)
    return [*made, sample_of([50], [60, 61, 62, 63, 64], loss_mask=loss_mask)]


@pytest.fixture
def embedded(tiny_checkpoint: Path) -> Any:
    def make(temperature: float, **changes: Any) -> Teacher:
        settings = TeacherSettings(checkpoint=str(tiny_checkpoint), threads=1)
        parts = {"tokenizer": load_tokenizer(tiny_checkpoint), "context_length": 64, "temperature": temperature}
        return EmbeddedTeacher(tiny_checkpoint, settings, **{**parts, **changes})

    return make


def expected(checkpoint: Path, sample: Sample, temperature: float) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = torch.tensor(sample.token_ids[None].astype(np.int64))
    with torch.no_grad():
        logprobs = (model(ids).logits[0].double() / temperature).log_softmax(-1)
    places = range(sample.prompt_length - 1, len(sample.token_ids) - 1)
    return np.array([float(logprobs[place, ids[0, place + 1]]) for place in places])


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_the_model_in_this_process_scores_at_the_temperature(
    temperature: float, embedded: Any, samples: list[Sample], tiny_checkpoint: Path
) -> None:
    async with embedded(temperature) as teacher:
        for sample in samples:
            told = await teacher.logprobs(sample)
            assert (told.dtype, told.shape) == (np.float32, (sample.response_length,))
            np.testing.assert_allclose(told, expected(tiny_checkpoint, sample, temperature), atol=2e-4)


async def test_servers_of_rollfeed_say_the_same(
    embedded: Any, embedded_server: Any, samples: list[Sample], tiny_checkpoint: Path
) -> None:
    tokenizer = load_tokenizer(tiny_checkpoint)
    async with embedded_server() as first, embedded_server() as second, embedded(1.0) as here:
        settings = TeacherSettings(servers=(first, second))
        async with ServedTeacher(settings, tokenizer=tokenizer, context_length=64) as teacher:
            for sample in samples:
                np.testing.assert_allclose(await teacher.logprobs(sample), await here.logprobs(sample), atol=1e-5)


async def test_a_server_with_another_tokenizer_is_refused_at_the_start(embedded_server: Any) -> None:
    async with embedded_server() as address:
        teacher = ServedTeacher(TeacherSettings(servers=(address,)), tokenizer=CharTokenizer(), context_length=64)
        with pytest.raises(EngineError, match=r"teacher.servers.*makes other tokens of a text than the policy's"):
            await teacher.__aenter__()


async def test_nothing_is_asked_for_what_is_not_trained_on(embedded: Any) -> None:
    sample = sample_of([50], [60, 61], loss_mask=np.zeros(2, np.float32))
    assert (await embedded(1.0).logprobs(sample)).tolist() == [0.0, 0.0]  # and it is not even open


async def test_a_sample_with_pictures_is_an_error(embedded: Any) -> None:
    picture = Picture(content_hash="0" * 64, media_type="image/png", width=2, height=2)
    async with embedded(1.0) as teacher:
        with pytest.raises(EngineError, match="takes text only, and the sample has pictures"):
            await teacher.logprobs(sample_of([50], [60], images=(picture,)))


async def test_ids_that_the_teacher_does_not_have_are_an_error(embedded: Any) -> None:
    async with embedded(1.0) as teacher:
        with pytest.raises(EngineError, match="outside the model's vocabulary"):
            await teacher.logprobs(sample_of([50], [60, 100_000]))


async def test_a_trained_token_that_nothing_predicts_is_an_error(embedded: Any) -> None:
    async with embedded(1.0) as teacher:
        with pytest.raises(EngineError, match="response token 0 has the log-probability nan"):
            await teacher.logprobs(sample_of([], [60, 61]))
        masked = await teacher.logprobs(sample_of([], [60, 61], loss_mask=np.array([0.0, 1.0], np.float32)))
        assert masked[0] == 0.0
        assert masked[1] < 0.0
