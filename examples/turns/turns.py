"""A generate function of two turns with a slow tool between them.

A run that is killed in the middle resumes there: what was sampled is not sampled again, and the tool is called once.
"""

import asyncio
from collections.abc import Sequence

from rollfeed.generate import Episode
from rollfeed.protocols import RolloutRequest, Services
from rollfeed.types import FinishKind, Sample


async def count_words(text: str) -> int:
    """A tool, as slow as a search or a build."""
    await asyncio.sleep(0.2)
    return len(text.split())


async def think_twice(request: RolloutRequest, *, services: Services) -> Sequence[Sample]:
    """Let the model answer, tell it how many words that were, and let it answer again."""
    episode = Episode(request, services)
    first = await episode.sample()
    if first.finish_reason.kind is not FinishKind.STOP:
        return episode.end(first)
    num_words = await episode.call("count_words", first.text, lambda: count_words(first.text), if_lost="some")
    episode.tell(f"\n(That was {num_words} words. Answer once more, in fewer.)\n")
    return episode.end(await episode.sample())


def brevity(sample: Sample, prompt: object) -> float:
    """A reward: a short last answer is better."""
    return 1.0 / (1 + len(sample.response))
