"""Make one batch of two-turn rollouts in the run directory given; stop where the second argument says, to be killed.

Every call of the tool is a line in the file ``calls`` of the directory; "stopped" is printed when all have stopped.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from rollfeed import RolloutConfig, open_rollouts
from rollfeed.generate import Episode
from rollfeed.store import RunDirectory
from rollfeed.testing import CharTokenizer, ListSource, ScriptedEngine

FOLDER, STOP = Path(sys.argv[1]), sys.argv[2]
NUM_ROLLOUTS = 4
stopped = []


async def stop() -> None:
    stopped.append(None)
    if len(stopped) == NUM_ROLLOUTS:
        print("stopped", flush=True)
    await asyncio.Event().wait()


async def generate(request, *, services):
    async def tool() -> str:
        with (FOLDER / "calls").open("a") as file:
            file.write(f"{request.rollout_id}\n")
        if STOP == "in the tool":
            await stop()
        return f"answer {request.rollout_id}"

    episode = Episode(request, services)
    first = await episode.sample()
    answer = await episode.call("tool", {"text": first.text}, tool, if_lost="lost")
    episode.tell(f" {answer} ")
    if STOP == "after the tool":
        await stop()
    last = await episode.sample()
    return episode.end(last, response=f"{first.text}|{answer}|{last.text}")


async def reward(sample, prompt) -> float:
    return 1.0


async def main() -> None:
    config = RolloutConfig(
        rollout={"rollout_batch_size": 2, "n_samples_per_prompt": 2},
        plugins={"generate": generate, "reward": reward},
    )
    engine = ScriptedEngine()
    with RunDirectory.open(FOLDER / "run", settings={}, identity={}, overwrite=False) as directory:
        async with open_rollouts(
            config,
            source=ListSource([f"prompt {number}" for number in range(8)]),
            engine=engine,
            tokenizer=CharTokenizer(),
            state=directory.state,
            commit=lambda step: directory.commit(step, reward_key=None),
            turns=directory.turns,
        ) as rollouts:
            batch = await rollouts.generate_batch()
    print(len(engine.requests))
    for sample in batch.samples:
        print(sample.response)


asyncio.run(main())
