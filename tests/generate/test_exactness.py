"""Whatever is said, called and thought, under any chat template: what is trained is what was sampled there."""

from __future__ import annotations

from random import Random
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.conversations.test_turns import said_by
from tests.conversations.zoo.families import FAMILIES, Family, load
from tests.generate.test_multi_turn import Echo, Talk, check_exact, turn_of

from rollfeed.environments import EnvironmentRegistry
from rollfeed.generate import by_environment
from rollfeed.prompts import ChatRenderer
from rollfeed.protocols import MULTI_TURN, REWRITTEN_TURNS, CallFormat, RewrittenTurns, RolloutRequest, Services
from rollfeed.tools import LimitedToolbox
from rollfeed.types import Prompt, Sample, SampleStatus, SamplingParams

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


async def play(name: str, endpoint: Echo, random: Random, *, num_turns: int, rewritten: RewrittenTurns) -> list[Sample]:
    box = LimitedToolbox(
        [Add(random)],
        call_format=CallFormat.AUTO,
        max_turns=num_turns,
        max_seconds=60.0,
        timeout_seconds=30.0,
        max_output_chars=200,
    )
    rendered = ChatRenderer(load(name), rollout_max_prompt_len=None, tools=box.definitions).render(
        random.choice(WORDS) + "?", apply_chat_template=True
    )
    talk = {"environment": Talk.environment_id, "params": {"num_turns": 99, "says": ["No {heard}."]}, MULTI_TURN: True}
    request = RolloutRequest(
        prompt=Prompt(prompt_id="a", source="a", **rendered._asdict(), metadata=talk),
        params=SamplingParams(max_new_tokens=8000, seed=7),
        group_index=0,
        index=0,
        rollout_id=0,
        step=0,
        max_context_length=16000,
    )
    services = Services(
        endpoint=endpoint,
        tokenizer=load(name),
        default=by_environment,
        environments=EnvironmentRegistry([Talk()]),
        tools=box,
        rewritten_turns=rewritten,
    )
    return list(await by_environment(request, services=services))


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
        samples = await play(name, endpoint, random, num_turns=len(turns), rewritten=rewritten)
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
