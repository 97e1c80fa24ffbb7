"""Servers whose memory is short, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollfeed.config.engine import SGLangSettings
from rollfeed.engine.client import ServerEngine
from rollfeed.engine.dialects import SGLang
from rollfeed.testing import CharTokenizer
from rollfeed.testing.fake_sglang import FakeSettings, TimeModelSettings, serve_fake_sglang
from rollfeed.testing.fake_sglang.settings import FakeMode
from rollfeed.testing.fake_sglang.time_model import draw_length
from rollfeed.testing.virtual_loop import run_in_virtual_time
from rollfeed.types import Completion, FinishKind, FolderUpdate, SamplingParams, VersionSpan

SHORT = TimeModelSettings(
    num_slots=64, kv_budget_tokens=6_000, median_length=400.0, sigma_between=0.3, sigma_within=0.3, max_length=1_000
)
PROMPTS = [np.array([index, 1, 2, 3], np.int32) for index in range(96)]


def answered(model: TimeModelSettings = SHORT, **changes: Any) -> tuple[Sequence[Completion], Mapping[str, float]]:
    """Answer all prompts at one server, and what the engine says then."""
    puts_back, update = changes.pop("puts_back", True), changes.pop("update", None)

    async def main() -> tuple[Sequence[Completion], Mapping[str, float]]:
        settings = FakeSettings(mode=FakeMode.TIME_MODEL, time_model=model, keep_requests=0)
        async with serve_fake_sglang(settings) as fakes:
            dialect = SGLang(SGLangSettings(workers=fakes.addresses, **changes))
            tokenizer = CharTokenizer()
            async with ServerEngine(dialect, context_length=8192, tokenizer=tokenizer, puts_back=puts_back) as engine:
                params = SamplingParams(max_new_tokens=1_000, seed=7)
                asked = (engine.generate(ids, params, request_id=f"r{i}") for i, ids in enumerate(PROMPTS))
                tasks = [asyncio.create_task(each) for each in asked]
                if update is not None:
                    while not engine.counters.put_back_requests:  # noqa: ASYNC110 - it has no event of its own
                        await asyncio.sleep(0.5)
                    await engine.apply(update)
                return await asyncio.gather(*tasks), engine.metrics()

    return run_in_virtual_time(main())


def assert_whole(completions: Sequence[Completion]) -> None:
    for ids, completion in zip(PROMPTS, completions, strict=True):
        num_tokens = len(completion.token_ids)
        assert num_tokens == len(completion.logprobs) == draw_length(SHORT, ids, 7)
        assert completion.finish_reason.kind is FinishKind.STOP
        assert completion.version_spans == (VersionSpan(0, num_tokens, 0),)


def test_the_youngest_requests_of_a_full_server_wait_here_and_go_on_from_their_tokens() -> None:
    completions, metrics = answered()
    assert_whole(completions)
    assert metrics["put_back_requests"] > 0
    assert metrics["resumed_requests"] > 0
    assert metrics["retries"] == metrics["unasked_aborts"] == metrics["orphaned_requests"] == 0
    assert max(completion.timings.queue_seconds for completion in completions) > 0.0


@pytest.mark.parametrize("mode", ["abort", "retract"])
def test_what_was_put_back_goes_on_with_new_weights_and_each_token_has_its_version(tmp_path: Path, mode: str) -> None:
    completions, metrics = answered(update=FolderUpdate(tmp_path, policy_version=1), weight_update=mode)
    assert metrics["put_back_requests"] > 0
    for ids, completion in zip(PROMPTS, completions, strict=True):
        spans = completion.version_spans
        assert len(completion.token_ids) == spans[-1].end == draw_length(SHORT, ids, 7)
        assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
        assert [span.policy_version for span in spans] in ([0], [1], [0, 1])
    assert {span.policy_version for each in completions for span in each.version_spans} == {0, 1}


@pytest.mark.parametrize("changes", [{"puts_back": False}, {"concurrency": 64}])
def test_nothing_is_put_back_where_that_would_change_samples_or_the_number_is_given(changes: Any) -> None:
    completions, metrics = answered(**changes)
    assert_whole(completions)
    assert metrics["put_back_requests"] == metrics["resumed_requests"] == 0
