"""What the pipeline is handed to learn from: lengths of earlier answers, and new weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from rollfeed.types import Group, Prompt, PromptDraw


class LengthPredictor(Protocol):
    """Predicts how long answers will be from how long they were."""

    def learn(self, group: Group) -> None:
        """Learn from a finished group."""

    def order(self, draws: Iterable[PromptDraw]) -> Sequence[PromptDraw]:
        """Return the draws, those with the longest answers first."""

    def is_long(self, prompt: Prompt) -> bool:
        """Whether the answers will be among the longest."""

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned, as JSON values."""


class WeightSource(Protocol):
    """Where complete checkpoints come from."""

    def newest(self) -> tuple[int, Path] | None:
        """Return the highest version that is complete, and its folder. Reads the disk."""

    async def wait_for(self, version: int, *, timeout_seconds: float) -> tuple[int, Path]:
        """Return the newest version when it is at least ``version``.

        Raises:
            RunFailedError: If it does not come in time.
        """
