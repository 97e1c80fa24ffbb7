"""The sets that RLVE evaluates on, in the form of its files: held-out environments, BBEH and LiveCodeBench."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollfeed import app
from rollfeed.config import EvalSettings, RolloutConfig
from rollfeed.testing import CharTokenizer, ScriptedEngine, ScriptedRequest

ANSWERS = {
    "1 + 2": "<answer>3</answer>",
    "option": r"It is \boxed{(A)}",
    "double": "```python\nprint(2 * int(input()))\n```",
}
CONFIG = {"seed": 4, "parameter": {"terms": [1, 2]}, "passing_reward_threshold": 1.0}
FILES = {
    "HELD-OUT": [
        {
            "user_prompt": f"1 + 2 = ? ({number})",
            "metadata": json.dumps({"environment": "core/add_numbers", "config": CONFIG}),
        }
        for number in range(3)
    ],
    "BBEH": [{"user_prompt": "Which option?", "label": "(A)"}, {"user_prompt": "Which option now?", "label": "(B)"}],
    "LiveCodeBench": [
        {"user_prompt": "Read a number, print its double.", "label": {"inputs": ["3\n"], "outputs": ["6\n"]}}
    ],
}


def answer(request: ScriptedRequest) -> str:
    text = CharTokenizer().decode(request.token_ids, skip_special_tokens=True)
    return next(found for key, found in ANSWERS.items() if key in text)


@pytest.mark.parametrize(("key", "bbeh"), [("accuracy", 0.5), ("reward", 0.55)])
async def test_all_three_are_measured_at_once(leaves_no_process: None, tmp_path: Path, key: str, bbeh: float) -> None:
    for name, rows in FILES.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {"input_key": "user_prompt"}
    prepared = app.prepare_evaluation(
        EvalSettings(
            datasets=[
                {**common, "path": "HELD-OUT.jsonl", "metadata_key": "metadata", "rm_type": "rlve", "reward_key": key},
                {**common, "path": "BBEH.jsonl", "label_key": "label", "rm_type": "bbeh", "reward_key": key},
                {
                    **common,
                    "path": "LiveCodeBench.jsonl",
                    "label_key": "label",
                    "rm_type": "livecodebench",
                    "n_samples_per_prompt": 16,
                },
            ],
            n_samples_per_prompt=4,
            max_response_len=200,
        ),
        config=RolloutConfig(),
        tokenizer=CharTokenizer(),
        context_length=1_000,
        folders=[tmp_path],
    )
    async with (engine := ScriptedEngine(answer=answer)):
        held_out, found, code = (await app.evaluate(prepared, engine=engine)).sets
    assert (held_out.num_prompts, held_out.accuracy, held_out.num_failed) == (3, 1.0, 0)
    assert (found.accuracy, found.reward_mean) == (0.5, pytest.approx(bbeh))
    assert code.pass_at_k == {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0, 16: 1.0}
