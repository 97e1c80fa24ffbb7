"""Real servers whose memory for keys and values is too small for what they are sent."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.engines.servers import sglang_server, vllm_server

from rollfeed.config.engine import OpenAISettings, SGLangSettings
from rollfeed.engine.client import ServerEngine
from rollfeed.engine.client.replies import ServerLoad
from rollfeed.engine.dialects import VLLM, SGLang
from rollfeed.types import Completion, SamplingParams

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

PATIENT: dict[str, Any] = {"request_timeout_seconds": 600.0, "startup_timeout_seconds": 120.0}
LONG = 700
"""Tokens of a response: of the servers' 2,080 places three such fill all."""


async def answered(dialect: Any, tokenizer: Any, asked: Sequence[NDArray[np.int32]]) -> tuple[list[Completion], float]:
    """Return the responses, and how many requests were put back."""
    params = SamplingParams(max_new_tokens=LONG)
    async with ServerEngine(dialect, context_length=1000, tokenizer=tokenizer) as engine:
        calls = [engine.generate(prompt, params, request_id=f"r{number}") for number, prompt in enumerate(asked)]
        completions = await asyncio.gather(*calls)
        metrics = engine.metrics()
        assert metrics["rejected_replies"] == metrics["retries"] == 0
        return completions, metrics["put_back_requests"]


async def test_the_youngest_leave_a_vllm_that_preempts(
    policy: Path, tokenizer: Any, prompts: Any, score: Any, tmp_path: Path
) -> None:
    with vllm_server(policy, tmp_path, "--block-size", "32", "--num-gpu-blocks-override", "65") as server:
        dialect = VLLM(OpenAISettings(base_url=server.address, max_concurrency=64, **PATIENT))
        asked = prompts(16)
        completions, num_put_back = await answered(dialect, tokenizer, asked)
    assert num_put_back > 0
    for prompt, completion in zip(asked, completions, strict=True):
        assert len(completion.token_ids) == LONG
        np.testing.assert_allclose(completion.logprobs, score(policy, prompt, completion.token_ids), atol=2e-4)


async def test_what_an_sglang_has_retracted_is_counted(
    policy: Path, tokenizer: Any, prompts: Any, score: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = [0]

    async def load(self: SGLang, address: str) -> ServerLoad | None:
        found = await load_of(self, address)
        told.append((found and found.total_preempted) or 0)
        return found

    load_of = SGLang.load
    monkeypatch.setattr(SGLang, "load", load)
    # It lets in all that it has room for now, and fewer after the first time, so that the youngest may stay.
    flags = ("--enable-metrics", "--max-total-tokens", "2080", "--schedule-conservativeness", "0.1")
    with sglang_server(policy, tmp_path, *flags) as server:
        asked = prompts(16)
        dialect = SGLang(SGLangSettings(workers=(server.address,), **PATIENT))
        completions, _ = await answered(dialect, tokenizer, asked)
        assert max(told) > 0
    for prompt, completion in zip(asked, completions, strict=True):
        assert 0 < len(completion.token_ids) <= LONG
        apart = np.abs(completion.logprobs - score(policy, prompt, completion.token_ids))
        assert apart.mean() < 0.02  # in 16 bits
