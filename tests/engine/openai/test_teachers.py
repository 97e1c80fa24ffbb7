"""A teacher on servers that speak as vLLM does."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from tests.engine.openai.conftest import raw_logprobs

from rollfeed.config.teacher import TeacherSettings
from rollfeed.engine.teachers import ServedTeacher
from rollfeed.errors import EngineError
from rollfeed.testing import CharTokenizer, sample_of

SAMPLE = sample_of([100, 101], [102, 97, 110])


def teacher_at(server: Any, **changes: Any) -> ServedTeacher:
    settings = TeacherSettings(servers=(server.address,), server_kind="openai", **{"max_tries": 1, **changes})
    return ServedTeacher(settings, tokenizer=CharTokenizer(), context_length=100)


async def test_each_token_has_the_logprob_of_its_id(vllm: Any) -> None:
    async with vllm() as server, teacher_at(server) as teacher:
        told = await teacher.logprobs(SAMPLE)
    wanted = [raw_logprobs(before)[token - 97] for before, token in pairwise(SAMPLE.token_ids[1:].tolist())]
    np.testing.assert_allclose(told, wanted, rtol=1e-6)


async def test_a_server_that_scores_no_prompts_is_an_error(vllm: Any) -> None:
    async with vllm(scores_prompts=False) as server, teacher_at(server) as teacher:
        with pytest.raises(EngineError, match="does not score texts of 5 tokens"):
            await teacher.logprobs(SAMPLE)


async def test_a_server_that_takes_less_than_the_longest_sample_is_refused_at_the_start(vllm: Any) -> None:
    models = [{"id": "letters", "object": "model", "max_model_len": 100}]
    async with vllm(models=models) as server:
        with pytest.raises(EngineError, match=r"teacher.servers.*takes 100 tokens"):
            await teacher_at(server).__aenter__()
