"""What an evaluation asks the engine: each key from the nearest that says it, and the same at every call."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rollfeed import app
from rollfeed.config import EvalSettings, RolloutConfig, SamplingSettings
from rollfeed.evaluation import answers_table
from rollfeed.testing import CharTokenizer, ScriptedEngine, ScriptedRequest

SAMPLING = {
    "rollout_temperature": 0.7,
    "rollout_top_p": 0.9,
    "rollout_top_k": 40,
    "rollout_max_response_len": 30,
    "min_new_tokens": 3,
    "repetition_penalty": 1.5,
    "rollout_stop": ("T",),
    "rollout_stop_token_ids": (10,),
    "rollout_skip_special_tokens": True,
}


def ask(data: Path, sampling: dict[str, Any], of_all: dict[str, Any], of_set: dict[str, Any]) -> list[ScriptedRequest]:
    """Return what one evaluation sends to an engine."""
    dataset = {"path": data.name, "input_key": "question", "label_key": "answer", **of_set}
    prepared = app.prepare_evaluation(
        EvalSettings(**{"datasets": [dataset], "rm_type": "exact", **of_all}),
        config=RolloutConfig(rollout={"n_samples_per_prompt": 2}, sampling=SamplingSettings(**sampling)),
        tokenizer=CharTokenizer(),
        context_length=1_000,
        folders=[data.parent],
    )
    engine = ScriptedEngine()

    async def measure() -> None:
        async with engine:
            await app.evaluate(prepared, engine=engine)

    asyncio.run(measure())
    return engine.requests


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "digits.jsonl"
    rows = [{"question": f"digit {number}", "answer": str(number)} for number in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("key", "sent", "in_training", "of_all", "of_set"),
    [
        ("temperature", "temperature", 0.7, 0.5, 0.0),
        ("top_p", "top_p", 0.9, 0.5, 1.0),
        ("top_k", "top_k", 40, 20, -1),
        ("max_response_len", "max_new_tokens", 30, 20, 10),
        ("min_new_tokens", "min_new_tokens", 3, 2, 0),
        ("repetition_penalty", "repetition_penalty", 1.5, 1.2, 1.0),
        ("stop", "stop", ("T",), ("A",), ()),
        ("stop_token_ids", "stop_token_ids", (10,), (20,), ()),
        ("skip_special_tokens", "skip_special_tokens", True, False, True),
    ],
)
def test_r38_each_key_sent_is_the_sets_before_the_defaults_before_trainings(
    data: Path, key: str, sent: str, in_training: Any, of_all: Any, of_set: Any
) -> None:
    """R38: nothing falls back to training, or to the defaults, that a nearer place says; neutral values included."""
    for said, expected in (
        (({}, {}), in_training),
        (({key: of_all}, {}), of_all),
        (({}, {key: of_set}), of_set),
        (({key: of_all}, {key: of_set}), of_set),
    ):
        requests = ask(data, SAMPLING, *said)
        assert {getattr(request.params, sent) for request in requests} == {expected}
        others = {name: getattr(requests[0].params, name) for name in requests[0].params.__slots__ if name != "seed"}
        untouched = ask(data, SAMPLING, {}, {})[0].params
        assert {name for name, value in others.items() if value != getattr(untouched, name)} <= {sent}


@pytest.mark.parametrize(
    ("of_all", "of_set", "expected"),
    [({}, {}, 6), ({"n_samples_per_prompt": 3}, {}, 9), ({"n_samples_per_prompt": 3}, {"n_samples_per_prompt": 1}, 3)],
)
def test_r38_so_does_the_number_of_answers(
    data: Path, of_all: dict[str, int], of_set: dict[str, int], expected: int
) -> None:
    """R38: the number of requests, too."""
    assert len(ask(data, SAMPLING, of_all, of_set)) == expected
    assert len(ask(data, SAMPLING, of_all, {**of_set, "num_prompts": 1})) == expected // 3


async def test_r39_requests_by_index_and_results_are_the_same_whatever_comes_first(data: Path) -> None:
    """R39: seeds derive from the set, the prompt and the answer, never from who arrives or ends first."""
    dataset = {"path": data.name, "input_key": "question", "label_key": "answer"}
    prepared = app.prepare_evaluation(
        EvalSettings(datasets=[dataset, {**dataset, "name": "again"}], rm_type="exact"),
        config=RolloutConfig(rollout={"n_samples_per_prompt": 3}),
        tokenizer=CharTokenizer(),
        context_length=1_000,
        folders=[data.parent],
    )
    asked, orders, answers = [], set(), []
    for attempt in range(5):
        random = Random(attempt)
        ended: list[str] = []

        def any_one(waiting: Sequence[ScriptedRequest], random: Random = random, ended: list[str] = ended) -> int:
            chosen = random.randrange(len(waiting))
            ended.append(waiting[chosen].request_id)
            return chosen

        engine = ScriptedEngine(next_of=any_one, max_running_requests=1 + 4 * attempt)
        async with engine:
            result = await app.evaluate(prepared, engine=engine)
        asked.append({r.request_id: (r.token_ids.tobytes(), r.params) for r in engine.requests})
        orders.add(tuple(ended))
        answers.append(answers_table(result).to_pylist())
    assert len(orders) == 5
    assert all(each == asked[0] for each in asked)
    assert all(each == answers[0] for each in answers)
    assert [(row["set"], row["index"], row["answer"]) for row in answers[0]] == [
        (name, index, answer) for name in ("digits", "again") for index in range(3) for answer in range(3)
    ]
    assert len({params.seed for _, params in asked[0].values()}) == prepared.num_answers == 18
