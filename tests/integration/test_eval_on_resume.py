"""An evaluation during training that is cut short is made again, whole, and counts once."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.integration.questions import OPTIONS, QUESTIONS

REWARD = """
import json
import os
from pathlib import Path

HERE = Path(__file__).parent

async def score(sample, prompt):
    reward = float(sample.response_token_ids.sum() % 3)
    if prompt.source != "questions":
        return reward
    with (HERE / "scored.jsonl").open("a") as file:
        version = [span.policy_version for span in sample.version_spans][:1]
        file.write(json.dumps([version, prompt.prompt_id, sample.response]) + "\\n")
    if (HERE / "die").exists() and (HERE / "scored.jsonl").read_text().count("\\n") >= int((HERE / "die").read_text()):
        os._exit(9)
    if prompt.label == "broken" and reward:
        raise ValueError("broken")
    return reward
"""
EXTRA = """
[train]
checkpoint_interval = 2
eval_interval = 2
micro_batch_tokens = 512
"""
EXTRA += QUESTIONS.format(reward="counted_scores:score", n_samples=2)


@pytest.fixture
def settings(settings_file, tmp_path: Path) -> Path:
    (tmp_path / "counted_scores.py").write_text(REWARD)
    labels = ["right", "right", "broken", "right", "broken"]
    rows = [{"prompt": f"question {number}", "answer": label} for number, label in enumerate(labels)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return settings_file(EXTRA, num_rollout=4)


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def test_r41_an_evaluation_that_was_cut_short_is_made_again_and_counts_once(
    rollfeed, start_rollfeed, settings: Path, tmp_path: Path
) -> None:
    """R41: each answer of the evaluation that counts is scored once, and all numbers are those of an unbroken run."""
    unbroken, broken, scored = tmp_path / "unbroken", tmp_path / "broken", tmp_path / "scored.jsonl"
    first = rollfeed("train", settings, "--out", unbroken, *OPTIONS)
    assert first.code == 0, first.err
    expected = lines(scored)
    num_first = sum(version == [0] for version, _, _ in expected)
    # In the middle of the evaluation before the first batch, then of the one after two.
    for last in (4, num_first + 4):
        scored.write_text("")
        (tmp_path / "die").write_text(str(last))
        process = start_rollfeed("train", settings, "--out", broken, *OPTIONS)
        output = process.read()
        assert process.wait() == 9, output
        assert scored.read_text().count("\n") == last
    (tmp_path / "die").unlink()
    counted = lines(scored)[:num_first]
    scored.write_text("")
    assert rollfeed("train", settings, "--out", broken, *OPTIONS).code == 0
    assert sorted([*counted, *lines(scored)]) == sorted(expected)
    ours, theirs = lines(broken / "eval.jsonl"), lines(unbroken / "eval.jsonl")
    assert [record["step"] for record in ours] == [0, 2, 4]
    assert sum(record["sets"]["questions"]["num_failed"] for record in ours) > 0
    assert without_times(ours) == without_times(theirs)
    assert without_times(lines(broken / "train.jsonl")) == without_times(lines(unbroken / "train.jsonl"))
