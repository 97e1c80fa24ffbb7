"""Make one batch of episodes with two tools in the run directory given; stop in them where asked, to be killed.

Every call is a line in the file ``calls`` of the directory; "stopped" is printed when all calls have stopped.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from rollfeed import RolloutConfig, open_rollouts
from rollfeed.app import load_functions
from rollfeed.environments import EnvironmentRegistry, EnvironmentSource
from rollfeed.prompts import ChatRenderer
from rollfeed.store import RunDirectory
from rollfeed.testing import CharTokenizer, ScriptedEngine
from rollfeed.testing.scripted import ScriptedRequest

FOLDER, STOPS = Path(sys.argv[1]), sys.argv[2] == "stop"
NUM_CALLS = 8
stopped: list[str] = []


class Append:
    """Does something outside, which is not to be done twice."""

    name = "append"
    description = "appends"
    parameters = {"type": "object", "properties": {}}  # noqa: RUF012
    is_idempotent = False

    async def call(self, arguments: Any) -> str:
        with (FOLDER / "calls").open("a") as file:
            file.write(f"{self.name}\n")
        if STOPS:
            stopped.append(self.name)
            if len(stopped) == NUM_CALLS:
                print("stopped", flush=True)
            await asyncio.Event().wait()
        return f"{self.name} is done"


class Look(Append):
    """May be called again."""

    name = "look"
    is_idempotent = True


def call_both_first(request: ScriptedRequest) -> str:
    said = CharTokenizer().decode(request.token_ids, skip_special_tokens=True)
    calls = (json.dumps({"name": name, "arguments": {}}) for name in ("append", "look"))
    return "7" if "\ntool: " in said else "".join(f"<tool_call>{call}</tool_call>" for call in calls)


async def main() -> None:
    config = RolloutConfig(
        rollout={"rollout_batch_size": 2, "n_samples_per_prompt": 2},
        sampling={"rollout_max_response_len": 2_000},
        tools={"use": (Append, Look)},
    )
    functions, engine = load_functions(config), ScriptedEngine(answer=call_both_first)
    tools = functions.services.toolbox.definitions
    renderer = ChatRenderer(CharTokenizer(), rollout_max_prompt_len=None, tools=tools)
    environment = EnvironmentRegistry().get("core/add_numbers")
    with RunDirectory.open(FOLDER / "run", settings={}, identity={}, overwrite=False) as directory:
        async with open_rollouts(
            config,
            source=EnvironmentSource(environment, level=0, seed=0, renderer=renderer),
            engine=engine,
            tokenizer=CharTokenizer(),
            functions=functions,
            state=directory.state,
            commit=lambda step: directory.commit(step, reward_key=None),
            turns=directory.turns,
        ) as rollouts:
            batch = await rollouts.generate_batch()
    print(len(engine.requests))
    for sample in batch.samples:
        told = sample.response_token_ids[sample.loss_mask == 0.0]
        print(json.dumps(CharTokenizer().decode(told, skip_special_tokens=True)))


asyncio.run(main())
