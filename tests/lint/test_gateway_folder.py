"""The folder of a gateway: its journal knows what was sampled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.clients import gateway, said

from rollfeed.app.lint import lint
from rollfeed.testing import ScriptedEngine


async def play(folder: Path) -> None:
    """Have two sessions of two turns and a fork, and finish them."""
    left = ["one two", "three", "four"] * 2
    async with gateway(ScriptedEngine(answer=lambda _: left.pop(0)), folder=folder) as client:
        for _ in range(2):
            opened = await client.open()
            question = {"role": "user", "content": "a"}
            turn = {"role": "assistant", "content": said(await client.chat(opened, [question]))}
            for told in ("b", "c"):
                await client.chat(opened, [question, turn, {"role": "user", "content": told}])
            await client.finish(opened)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    asyncio.run(play(tmp_path))
    return tmp_path


def test_sessions_and_their_forks_are_clean(folder: Path) -> None:
    report = lint(folder)
    assert report.num_samples == 4
    assert report.findings == []


def other_token(sample: dict[str, Any]) -> None:
    sample["token_ids"][-2] += 1


def other_logprob(sample: dict[str, Any]) -> None:
    sample["logprobs"][0] -= 0.5


@pytest.mark.parametrize(
    ("plant", "kind"), [(other_token, "retokenised_turn"), (other_logprob, "logprob_of_another_token")]
)
def test_a_turn_that_was_not_sampled_so_is_found(folder: Path, plant: Callable[[Any], None], kind: str) -> None:
    path = folder / "samples.jsonl"
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    plant(samples[2])
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    (found,) = lint(folder).findings
    assert (found.kind, found.place.source) == (kind, "samples.jsonl, line 3")
