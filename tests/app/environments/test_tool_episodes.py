"""Episodes of core/calc_tool in a run: calls are sampled and trained on, what the calculator says is not."""

from __future__ import annotations

import re

from rollfeed.app import open_rollouts
from rollfeed.app.sources import build_source
from rollfeed.config import Settings
from rollfeed.environments.builtin.arithmetic import evaluate
from rollfeed.testing import CharTokenizer, ScriptedEngine, ScriptedRequest
from rollfeed.types import Sample, StepCommit


def calls_then_answers(request: ScriptedRequest) -> str:
    """Ask the calculator for the whole expression, and say what it says; odd seeds guess."""
    text = CharTokenizer().decode(request.token_ids, skip_special_tokens=True)
    told = re.search(r"= (\d+)", text)
    if (request.params.seed or 0) % 2 and told is None:
        return "It is 7."
    (expression,) = re.findall(r"What is (.*)\?", text)
    return f"calc: {expression}" if told is None else f"It is {told[1]}."


async def test_calls_are_trained_on_and_what_they_bring_is_not() -> None:
    settings = Settings.model_validate(
        {
            "prompts": {"environments": [{"id": "core/calc_tool", "level": 3}]},
            "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 4},
        }
    )
    commits: list[StepCommit] = []
    async with open_rollouts(
        settings,
        source=build_source(settings, CharTokenizer()),
        engine=ScriptedEngine(answer=calls_then_answers),
        tokenizer=CharTokenizer(),
        commit=commits.append,
    ) as rollouts:
        await rollouts.generate_batch()
    (samples,) = (commit.batch.samples for commit in commits)
    assert {has_called(sample) for sample in samples} == {True, False}


def has_called(sample: Sample) -> bool:
    """Check what is trained on of a sample, and return whether it called the calculator."""
    decode = CharTokenizer().decode
    response = sample.token_ids[len(sample.token_ids) - len(sample.loss_mask) :]
    trained = decode(response[sample.loss_mask > 0], skip_special_tokens=True)
    told = decode(response[sample.loss_mask == 0], skip_special_tokens=True)
    called = "calc: " in trained
    if called:
        value = evaluate(sample.metadata["params"]["expression"])[0]
        assert f"= {value}" in told
        assert trained.endswith(f"It is {value}.")
        assert sample.metadata["num_turns"] == 2
    assert sample.reward == 1.0 if called else sample.reward < 0.2  # type: ignore[operator]
    assert "= " not in trained
    return called
