"""Rewards that teach nothing: the right ones, handed out within each group at random."""

from collections.abc import Sequence
from random import Random

import numpy as np
from numpy.typing import NDArray

from rollfeed.environments import EnvironmentRegistry
from rollfeed.seeds import derive_seed
from rollfeed.types import Group, Prompt, Sample


def shuffled(samples: Sequence[Sample], prompt: Prompt) -> list[float]:
    environment = EnvironmentRegistry().get(str(prompt.metadata["environment"]))
    rewards = [environment.verify(prompt.metadata["params"], sample.response).reward for sample in samples]
    Random(derive_seed("shuffled", *(sample.index for sample in samples))).shuffle(rewards)
    return [float(reward) for reward in rewards]


def shuffled_advantages(rewards_G: NDArray[np.float64], *, group: Group) -> NDArray[np.float64]:
    """The same for rewards that come with the samples."""
    shuffled_G = np.random.default_rng(derive_seed("shuffled", group.group_index)).permutation(rewards_G)
    return shuffled_G - shuffled_G.mean()
