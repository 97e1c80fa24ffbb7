"""Policies: they choose the waiting prompts that leave the buffer first.

The age of a prompt is that of the oldest token that an earlier execution left: this is what decides whether its
group may be trained on. One without tokens has no age; all of its tokens are still to come.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollfeed.config import BufferPolicyName
from rollfeed.errors import ConfigError
from rollfeed.protocols import BufferPolicy
from rollfeed.types import Group


def oldest_version(group: Group) -> int | None:
    """Return the version of the oldest token that an earlier execution left; None without tokens."""
    versions = [sample.oldest_version for rollout in group.rollouts for sample in rollout.samples]
    return min((version for version in versions if version is not None), default=None)


def fifo(entries: Sequence[Group], count: int, *, policy_version: int) -> Sequence[int]:
    """Choose in the order in which prompts were drawn; fits :class:`rollfeed.protocols.BufferPolicy`."""
    del policy_version
    return sorted(range(len(entries)), key=lambda index: entries[index].group_index)[:count]


def freshest(entries: Sequence[Group], count: int, *, policy_version: int) -> Sequence[int]:
    """Choose those with the newest tokens; fits :class:`rollfeed.protocols.BufferPolicy`.

    A prompt without tokens counts as fresh as the engine. Among equals the first drawn is first. Old ones wait as
    long as newer ones come in.
    """

    def key(index: int) -> tuple[int, int]:
        oldest = oldest_version(entries[index])
        return -(policy_version if oldest is None else oldest), entries[index].group_index

    return sorted(range(len(entries)), key=key)[:count]


def max_staleness(limit: int | None) -> BufferPolicy:
    """Return a policy that resumes what would soon be too old, before it is.

    First come prompts with tokens at most ``limit`` versions behind the engine, the oldest of them first; then those
    without tokens; last those over the limit, whose old tokens will not be trained on as they are: what becomes of
    these, the staleness policy of the run says. Among equals the first drawn is first. Without a limit none is over it.

    Raises:
        ConfigError: If ``limit`` is below 0.
    """
    if limit is not None and limit < 0:
        raise ConfigError(f"max_staleness = {limit}: must be at least 0")

    def choose(entries: Sequence[Group], count: int, *, policy_version: int) -> Sequence[int]:
        def key(index: int) -> tuple[int, int, int]:
            oldest, group_index = oldest_version(entries[index]), entries[index].group_index
            if oldest is None:
                return 1, 0, group_index
            if limit is not None and policy_version - oldest > limit:
                return 2, 0, group_index
            return 0, oldest, group_index

        return sorted(range(len(entries)), key=key)[:count]

    return choose


def built_in_policy(name: BufferPolicyName, *, staleness_limit: int | None) -> BufferPolicy:
    """Return a policy by its name in the settings; ``staleness_limit`` is ``rollout.max_staleness``."""
    policies = {
        BufferPolicyName.FIFO: fifo,
        BufferPolicyName.FRESHEST: freshest,
        BufferPolicyName.MAX_STALENESS: max_staleness(staleness_limit),
    }
    return policies[name]
