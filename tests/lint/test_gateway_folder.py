"""The folder of a gateway: its journal knows what was sampled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conversations.zoo.families import FAMILIES, save
from tests.gateway.clients import gateway, said

from rollfeed.app.lint import lint
from rollfeed.cli.main import main
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


def test_sessions_go_to_trajectories_and_back(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    out, model = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("model")
    save(FAMILIES["chatml"], model)
    assert main(["atif", "export", str(folder), "--out", str(out / "told")]) == 2
    assert main(["atif", "export", str(folder), "--out", str(out / "told"), "--tokenizer", str(model)]) == 0
    assert main(["atif", "import", str(out / "told"), "--out", str(out)]) == 0
    before, after = (
        {each["index"]: each for each in map(json.loads, (path / "samples.jsonl").read_text().splitlines())}
        for path in (folder, out)
    )
    assert after == before
    sessions = {json.loads(path.read_text())["session_id"] for path in (out / "told").iterdir()}
    assert sessions == {sample["metadata"]["session_id"] for sample in before.values()}


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
