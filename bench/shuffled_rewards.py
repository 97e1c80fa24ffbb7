"""Rewards that teach nothing: the right ones, handed out within each group at random."""

from collections.abc import Sequence
from random import Random

from rollfeed.environments import EnvironmentRegistry
from rollfeed.seeds import derive_seed
from rollfeed.types import Prompt, Sample


def shuffled(samples: Sequence[Sample], prompt: Prompt) -> list[float]:
    environment = EnvironmentRegistry().get(str(prompt.metadata["environment"]))
    rewards = [environment.verify(prompt.metadata["params"], sample.response).reward for sample in samples]
    Random(derive_seed("shuffled", *(sample.index for sample in samples))).shuffle(rewards)
    return [float(reward) for reward in rewards]
