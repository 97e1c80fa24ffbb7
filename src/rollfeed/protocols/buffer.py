"""Prompts that wait between two executions, and which of them go on first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from rollfeed.types import PromptDraw


class BufferPolicy(Protocol):
    """Chooses which waiting prompts leave the buffer next. *Extension point*.

    The buffer does the removing, so that a policy cannot lose a prompt. It must be a pure function: it is also asked
    for the order of all entries, when the buffer is to decide which of them can wait on the disk.
    """

    def __call__(self, entries: Sequence[PromptDraw], count: int, *, policy_version: int) -> Sequence[int]:
        """Return indices into ``entries``, the first to leave first: at most ``count``, each once.

        Args:
            entries: All that wait, by group index. Statuses, lengths, rewards and version spans are always there;
                what is on the disk has tokens of -1, logprobs of NaN, and no text or metadata.
            count: How many are asked for.
            policy_version: The engine's now.
        """


class PromptBuffer(Protocol):
    """Holds prompts that wait to be answered again or gone on with."""

    def __len__(self) -> int:
        """Return how many wait."""

    def add(self, draws: Iterable[PromptDraw]) -> None:
        """Take prompts, all or none.

        Raises:
            RunFailedError: If one has another number of rollouts than a group, or is in the buffer already.
        """

    def take(self, count: int, *, policy_version: int) -> list[PromptDraw]:
        """Remove and return up to ``count`` prompts, in the order of the policy.

        Raises:
            PluginError: If the policy returns something else than indices, each once; nothing is removed.
        """

    def snapshot(self) -> Sequence[PromptDraw]:
        """Return all that wait, by group index; what is on the disk is read when it is asked for."""
