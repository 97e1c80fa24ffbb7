"""Whatever is said, called and thought, under any chat template: what is trained is what was sampled there."""

from __future__ import annotations

from random import Random
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.conversations.test_turns import said_by
from tests.conversations.zoo.families import FAMILIES, Family
from tests.generate.test_multi_turn import Echo, check_exact, turn_of
from tests.generate.test_tools import box_of, play

from rollfeed.protocols import REWRITTEN_TURNS, RewrittenTurns
from rollfeed.types import SampleStatus

NUM_CONVERSATIONS = [34, pytest.param(700, marks=pytest.mark.soak)]
"""Of each family, with forks and with what is appended."""
WORDS = ["the result", " and\n\n", "caf\u00e9  ", '{"a": "b"}', "42", "<tool_call>", "\n\n", "w \U0001f600"]
KEEP_TURNS = {"chatml", "smollm2", "qwen2.5", "phi", "glm4", "merged_results", "numbered", "plain"}
THOUGHTS = ["<think>\nWell.\n</think>\n\n", "<think>\n\n</think>\n\n", "Well.\n</think>\n\n", ""]


class Add:
    """A tool, and what it says is as odd as what the policy says."""

    name, description, is_idempotent = "add", "adds", True
    parameters: ClassVar = {"type": "object", "properties": {}}

    def __init__(self, random: Random) -> None:
        self._random = random

    async def call(self, arguments: Any) -> str:
        return self._random.choice(WORDS) + self._random.choice(THOUGHTS)


def said(family: Family, random: Random) -> str:
    """Return a turn without its end: a text, a call or several, with a thought perhaps, as models write them."""
    thought = random.choice(THOUGHTS)
    if random.random() < 0.5:
        return thought + random.choice(WORDS)
    call = {"function": {"name": random.choice(["add", "search"]), "arguments": {"q": random.choice(WORDS)}}}
    calls = [call] * random.randrange(1, max(2, family.max_calls + 1))
    return said_by(family, {"content": random.choice(["", "Let me see."]), "tool_calls": calls}, thought=thought)


@pytest.mark.parametrize("num_conversations", NUM_CONVERSATIONS)
@pytest.mark.parametrize("rewritten", [RewrittenTurns.FORK, RewrittenTurns.APPEND])
@pytest.mark.parametrize("name", FAMILIES)
async def test_r01_r04_r05_every_trained_token_was_sampled_there_in_that_context(
    name: str, rewritten: RewrittenTurns, num_conversations: int
) -> None:
    random, num_rewritten, num_calls = Random(f"{name} {rewritten}"), 0, 0
    for _ in range(num_conversations):
        turns: list[NDArray[np.int32]] = [
            turn_of(name, said(FAMILIES[name], random), random) for _ in range(random.randrange(1, 6))
        ]
        endpoint = Echo(turns)
        box, talk = box_of(Add(random), max_turns=len(turns)), {"num_turns": 99, "says": ["No {heard}."]}
        samples = await play(name, endpoint, box, talk=talk, rewritten=rewritten)
        check_exact(samples, endpoint, turns)
        assert samples[-1].status is SampleStatus.TRUNCATED
        assert {(sample.status, sample.reward) for sample in samples[:-1]} <= {(SampleStatus.COMPLETED, -1.0)}
        assert len({params.seed for params in endpoint.params}) == len(turns)
        counted = samples[-1].metadata.get(REWRITTEN_TURNS, 0)
        assert counted == len(samples) - 1 if rewritten is RewrittenTurns.FORK else len(samples) == 1
        num_rewritten += counted
        num_calls += samples[-1].metadata["num_tool_calls"]
    assert bool(num_rewritten) is (name not in KEEP_TURNS)
    assert num_calls
