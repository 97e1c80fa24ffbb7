"""A teacher on real servers: what they say of sampled tokens is what transformers says, by id and in its place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.engines.servers import sglang_server, vllm_server

from rollfeed.config.teacher import TeacherSettings
from rollfeed.engine.teachers import ServedTeacher
from rollfeed.errors import EngineError
from rollfeed.prompts.tokenizer import LocalTokenizer
from rollfeed.testing import CharTokenizer, sample_of
from rollfeed.types import Sample

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

CONTEXT_LENGTH = 1000


@pytest.fixture
def samples(prompts: Any) -> Sequence[Sample]:
    """Of lengths from a token to the longest, with all ids of the vocabulary among them."""
    random = np.random.default_rng(1)
    every = random.permutation(259).astype(np.int32)
    responses = [every[:1], every, random.integers(3, 259, CONTEXT_LENGTH - 8).astype(np.int32)]
    return [sample_of(prompt, response) for prompt, response in zip(prompts(3), responses, strict=True)]


async def check(teacher: ServedTeacher, samples: Sequence[Sample], score: Any, policy: Path, *, atol: float) -> None:
    async with teacher:
        for sample in samples:
            told: NDArray[np.float32] = await teacher.logprobs(sample)
            wanted = score(policy, sample.token_ids[: sample.prompt_length], sample.response_token_ids)
            np.testing.assert_allclose(told, wanted, atol=atol)


def settings_of(server: Any, kind: str) -> TeacherSettings:
    return TeacherSettings(servers=(server.address,), server_kind=kind, timeout_seconds=600.0)  # type: ignore[arg-type]


async def test_vllm_scores_the_sampled_tokens_and_another_tokenizer_is_refused(
    policy: Path, tokenizer: LocalTokenizer, samples: Sequence[Sample], score: Any, tmp_path: Path
) -> None:
    with vllm_server(policy, tmp_path) as server:
        settings = settings_of(server, "openai")
        teacher = ServedTeacher(settings, tokenizer=tokenizer, context_length=CONTEXT_LENGTH)
        await check(teacher, samples, score, policy, atol=2e-3)
        with pytest.raises(EngineError, match="it makes other tokens of a text"):
            await ServedTeacher(settings, tokenizer=CharTokenizer(), context_length=CONTEXT_LENGTH).__aenter__()


async def test_a_run_learns_from_a_teacher_on_vllm(policy: Path, command: Any, tmp_path: Path) -> None:
    with vllm_server(policy, tmp_path) as server:
        taught = command(**{"teacher.servers": [server.address], "teacher.server_kind": "openai"})
        code, output = taught.run("train", num_rollout=2)
    assert code == 0, output
    metrics = taught.lines("metrics.jsonl")
    # The policy is the teacher at first, and leaves it only by what is told of it.
    assert abs(metrics[0]["rollout/teacher_kl"]) < 1e-3
    rows = taught.rows()
    assert len(rows) == 2 * 2 * 4
    assert all(np.isfinite(row["teacher_logprobs"]).all() for row in rows)


async def test_sglang_scores_the_sampled_tokens_and_another_tokenizer_is_refused(
    policy: Path, tokenizer: LocalTokenizer, samples: Sequence[Sample], score: Any, tmp_path: Path
) -> None:
    with sglang_server(policy, tmp_path) as server:
        settings = settings_of(server, "sglang")
        teacher = ServedTeacher(settings, tokenizer=tokenizer, context_length=CONTEXT_LENGTH)
        await check(teacher, samples, score, policy, atol=0.1)  # which serves it in fp16
        with pytest.raises(EngineError, match="it makes other tokens of a text"):
            await ServedTeacher(settings, tokenizer=CharTokenizer(), context_length=CONTEXT_LENGTH).__aenter__()
