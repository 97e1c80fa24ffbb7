"""Several sources of prompts, drawn from by weight.

Invariant: which source draw number n comes from depends on the seed, n, the weights and which sources have
ended, not on how many prompts are drawn at a time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from itertools import chain
from typing import Any

from rollfeed.errors import ConfigError, SourceFailedError
from rollfeed.prompts.dataset import DatasetSource
from rollfeed.protocols import HasMetrics, PromptSource
from rollfeed.seeds import choose, derive_seed
from rollfeed.types import Group, Prompt

_log = logging.getLogger(__name__)


class MixtureSource(PromptSource):
    """Draws from each source in proportion to its weight; a source that has ended or failed is left out.

    ``resources`` are entered before the sources and left after them.

    Raises:
        ConfigError: If there is no source, two have the same name, or a weight is not above 0.
    """

    def __init__(
        self,
        sources: Sequence[tuple[str, float, PromptSource]],
        *,
        seed: int,
        resources: Sequence[AbstractAsyncContextManager[object]] = (),
    ) -> None:
        if not sources:
            raise ConfigError("no prompt source: name at least one data set or environment")
        names = [name for name, _, _ in sources]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"two prompt sources are called {twice[0]!r}: give one of them another name")
        for name, weight, _ in sources:
            if not (math.isfinite(weight) and weight > 0):
                raise ConfigError(f"prompt source {name!r}: weight = {weight}: must be above 0 and finite")
        self._sources = {name: source for name, _, source in sources}
        self._weights = {name: weight for name, weight, _ in sources}
        self._seed = seed
        self._resources = resources
        self._entered = AsyncExitStack()
        self._num_draws = 0
        self._ended: dict[str, str] = {}
        """Sources that are left out, and why where they have failed."""

    async def __aenter__(self) -> MixtureSource:
        async with AsyncExitStack() as entered:
            for each in (*self._resources, *self._sources.values()):
                if isinstance(each, AbstractAsyncContextManager):
                    await entered.enter_async_context(each)
            self._entered = entered.pop_all()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._entered.aclose()

    @property
    def num_prompts(self) -> int | None:
        """Prompts of an epoch; None where a source does not end, or does not say."""
        datasets = self._datasets
        if len(datasets) < len(self._sources) or any(dataset.is_endless for dataset in datasets):
            return None
        return sum(map(len, datasets))

    @property
    def sources(self) -> Sequence[PromptSource]:
        """The sources that it draws from, as they were given."""
        return tuple(self._sources.values())

    @property
    def dataset_prompts(self) -> Iterator[Prompt]:
        """All prompts of data sets, once each."""
        return chain.from_iterable(dataset.prompts for dataset in self._datasets)

    @property
    def _datasets(self) -> list[DatasetSource]:
        return [source for source in self._sources.values() if isinstance(source, DatasetSource)]

    async def draw(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts; fewer only when every source has ended or failed.

        Raises:
            SourceFailedError: If there are none, and a source has failed.
        """
        drawn: list[Prompt] = []
        while len(drawn) < count and len(self._ended) < len(self._sources):
            name = self._choose()
            try:
                prompts = await self._sources[name].draw(1)
            except SourceFailedError as error:
                _log.warning("prompt source %s is left out from now on: %s", name, error)
                self._ended[name] = str(error)
                continue
            if not prompts:
                self._ended[name] = ""
                continue
            drawn.extend(prompts)
            self._num_draws += 1
        failures = list(filter(None, self._ended.values()))
        if failures and not drawn and count:
            raise SourceFailedError(f"no prompt source is left: {'; '.join(failures)}")
        return drawn

    def learn(self, group: Group) -> None:
        """Tell the source that the group's prompt is of."""
        if (source := self._sources.get(group.prompt.source)) is not None:
            source.learn(group)

    def end_step(self) -> None:
        """Have every source draw its conclusions."""
        for source in self._sources.values():
            source.end_step()

    def metrics(self) -> dict[str, float]:
        """Return the figures of all sources that have some."""
        sources = [source for source in self._sources.values() if isinstance(source, HasMetrics)]
        return {name: value for source in sources for name, value in source.metrics().items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the number of draws and every source's own state by name."""
        return {
            "num_draws": self._num_draws,
            "sources": {name: source.state_dict() for name, source in self._sources.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position that :meth:`state_dict` returned.

        Raises:
            ConfigError: If a source is new or gone, or refuses its state.
        """
        states: Mapping[str, Any] = state["sources"]
        changes = [f"{name!r} is new" for name in self._sources if name not in states]
        changes += [f"{name!r} is gone" for name in states if name not in self._sources]
        if changes:
            raise ConfigError(
                f"the prompt sources are not those the run began with: {', '.join(changes)}: "
                "restore them, or start a new run"
            )
        for name, source in self._sources.items():
            source.load_state_dict(states[name])
        self._num_draws = state["num_draws"]
        self._ended.clear()

    def _choose(self) -> str:
        """Choose among the sources that have not ended, by a number that only the draw decides."""
        weights = {name: weight for name, weight in self._weights.items() if name not in self._ended}
        return choose(weights, derive_seed(self._seed, "mix", self._num_draws))
