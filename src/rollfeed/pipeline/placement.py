"""Which prompts start first, by how long their answers were before.

Two ways against the long tail of a step: start long answers first (``long_first``), or collect prompts with long
answers until they fill a round of their own (``tail_batching``; RollPacker, arXiv:2509.21009), which keeps every
round on policy and all of its answers about equally long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollfeed.protocols import LengthPredictor
from rollfeed.types import Group, PromptDraw


class Placement:
    """Orders new prompts and holds long ones back.

    Args:
        lengths: What earlier answers were like; None where nothing is ordered.
        long_first: Whether prompts that are drawn together start with the longest.
        round_size: Prompts of a round of long ones; None where there are no such rounds.
    """

    def __init__(
        self, lengths: LengthPredictor | None = None, *, long_first: bool = False, round_size: int | None = None
    ) -> None:
        self._lengths = lengths
        self._long_first = long_first
        self._round_size = round_size
        self._held: list[PromptDraw] = []
        self._tail: list[PromptDraw] = []
        """What is left of the present round of long prompts."""

    @property
    def held(self) -> Sequence[PromptDraw]:
        """Prompts that wait here."""
        return [*self._tail, *self._held]

    def begin_step(self) -> None:
        """Make this step a round of long prompts if there are enough of them."""
        if self._round_size is not None and not self._tail and len(self._held) >= self._round_size:
            self._tail, self._held = self._held[: self._round_size], self._held[self._round_size :]

    def tail(self, count: int) -> list[PromptDraw]:
        """Return up to ``count`` prompts of a round of long ones; none in other steps."""
        taken, self._tail = self._tail[:count], self._tail[count:]
        return taken

    def order(self, draws: list[PromptDraw]) -> list[PromptDraw]:
        """Return new prompts in the order in which they start, without those that are held back."""
        lengths = self._lengths
        if lengths is None:
            return draws
        if self._round_size is not None:
            self._held += [draw for draw in draws if lengths.is_long(draw.prompt)]
            draws = [draw for draw in draws if not lengths.is_long(draw.prompt)]
        return list(lengths.order(draws)) if self._long_first else draws

    def release(self, count: int) -> list[PromptDraw]:
        """Return up to ``count`` of the prompts that are held back."""
        released, self._held = self._held[:count], self._held[count:]
        return released

    def learn(self, groups: Iterable[Group]) -> None:
        """Learn from finished groups."""
        if self._lengths is not None:
            for group in sorted(groups, key=lambda group: group.group_index):
                self._lengths.learn(group)

    def state_dict(self) -> Mapping[str, Any]:
        """Return what was learned, as JSON values."""
        return {} if self._lengths is None else self._lengths.state_dict()
