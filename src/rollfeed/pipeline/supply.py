"""Prompts with their numbers: those that wait first, then new ones from the source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollfeed.errors import PluginError, RollfeedError, SourceFailedError
from rollfeed.faults import blaming, complaint, describe, is_own
from rollfeed.pipeline.ledger import Ledger
from rollfeed.pipeline.placement import Placement
from rollfeed.protocols import HasMetrics, PromptBuffer, PromptSource
from rollfeed.types import Group, Prompt, RunState


class PromptSupply:
    """Numbers what the source hands out; a prompt that is taken back keeps its number.

    ``state`` is where an earlier process left all of them.

    Raises:
        ConfigError: If the source does not go there.
    """

    def __init__(
        self,
        source: PromptSource,
        *,
        ledger: Ledger,
        buffer: PromptBuffer,
        placement: Placement,
        state: RunState | None,
    ) -> None:
        self._source = source
        self._setting = "prompts" if is_own(source) else "plugins.prompt_source"
        self._ledger = ledger
        self._buffer = buffer
        self._placement = placement
        self.failure: str | None = None
        """Why the source can make no more, once it is known."""
        self.next_group_index = 0
        if state is not None:
            self.next_group_index = state.next_group_index
            self._load(state.source)
            if placement.lengths is not None and state.lengths:
                placement.lengths.load_state_dict(state.lengths)

    @property
    def requeued(self) -> Sequence[Group]:
        """Prompts that wait to be answered again or resumed, by group index, as of now."""
        held = self._placement.held
        waiting = self._buffer.snapshot()
        return sorted([*waiting, *held], key=lambda group: group.group_index) if held else waiting

    async def draw(self, count: int, *, policy_version: int) -> list[Group]:
        """Return the next ``count`` prompts; fewer only when the source has ended, or failed as ``failure`` says.

        Whatever ends it early, what was drawn waits in the buffer then.

        Raises:
            RunFailedError: If the source or the buffer's policy raises, or returns something else than it must.
        """
        groups = self._placement.tail(count)
        try:
            groups += self._buffer.take(count - len(groups), policy_version=policy_version)
            while len(groups) < count:
                new = await self._draw_new(count - len(groups))
                if not new:
                    # What was held back is all there is.
                    groups += self._placement.release(count - len(groups))
                    break
                groups += self._placement.order(new)
        except BaseException:
            self._buffer.add(groups)
            raise
        return groups

    def learn(self, groups: Iterable[Group]) -> None:
        """Tell what learns of a step's scored groups, in order. Raises RunFailedError if the source raises."""
        for group in groups:
            if self._placement.lengths is not None:
                self._placement.lengths.learn(group)
            with blaming(self._setting, self._source):
                self._source.learn(group)
        with blaming(self._setting, self._source):
            self._source.end_step()

    def learned(self) -> dict[str, Mapping[str, Any]]:
        """Return the states of what learns, as fields of :class:`RunState`.

        Raises:
            RunFailedError: If the source raises.
        """
        lengths = self._placement.lengths
        with blaming(self._setting, self._source):
            source = self._source.state_dict()
        return {"source": source, "lengths": {} if lengths is None else lengths.state_dict()}

    def metrics(self) -> Mapping[str, float]:
        """Return the figures of the source. Raises RunFailedError if the source raises."""
        if not isinstance(self._source, HasMetrics):
            return {}
        with blaming(self._setting, self._source):
            return dict(self._source.metrics())

    def requeue(self, groups: Iterable[Group]) -> None:
        """Take prompts back; they are drawn again before new ones."""
        self._buffer.add(groups)

    def _load(self, state: Mapping[str, Any]) -> None:
        try:
            self._source.load_state_dict(state)
        except RollfeedError:
            raise
        except Exception as error:
            raise PluginError(f"{self._setting}: load_state_dict: {describe(error, self._source)}") from error

    def _numbered(self, prompts: Sequence[Prompt], *, most: int) -> list[Group]:
        if len(prompts) > most or not all(isinstance(prompt, Prompt) for prompt in prompts):
            told = f"{len(prompts)} of {', '.join(sorted({type(prompt).__name__ for prompt in prompts}))}"
            raise complaint(self._setting, self._source, f"returned {told}; {most} prompts were asked for")
        groups = []
        for prompt in prompts:
            groups.append(Group(self.next_group_index, prompt))
            self._ledger.draw(self.next_group_index)
            self.next_group_index += 1
        return groups

    async def _draw_new(self, count: int) -> list[Group]:
        """Return up to ``count`` new groups; of a source of ours, whose draws may wait, none is lost that was drawn."""
        groups: list[Group] = []
        at_once = 1 if is_own(self._source) else count
        try:
            while (most := min(at_once, count - len(groups))) > 0:
                with blaming(self._setting, self._source):
                    prompts = list(await self._source.draw(most))
                if not prompts:
                    break
                groups += self._numbered(prompts, most=most)
        except SourceFailedError as error:
            self.failure = str(error)
        except BaseException:
            self._buffer.add(groups)
            raise
        return groups
