"""Orders prompts for their start by how long their answers were before.

Two ways against the long tail of a step: start long answers first (``long_first``), or collect prompts with long
answers until they fill a round of their own (``tail_batching``; RollPacker, arXiv:2509.21009), which keeps every
round on policy and all of its answers about equally long.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from rollfeed.errors import ConfigError
from rollfeed.protocols import Learner
from rollfeed.types import Group, Prompt

_EPOCH = re.compile(r"@e[0-9]+$")
_RECENT = 1024
"""Prompts that the quantile is of."""
_LONG_QUANTILE = 0.8
"""A prompt is long when its mean is above this quantile of those last seen."""
_WEIGHT = 0.3
"""Of the newest group in a prompt's mean, once there are more of them than its inverse."""

_Key: TypeAlias = tuple[str, str]
"""Source, and the prompt or the level in it."""


class _Mean(NamedTuple):
    mean: float
    """Tokens of a response."""
    num_groups: int
    """Observations in it."""

    def with_value(self, value: float) -> _Mean:
        """Return the plain mean while there are few values, the exponential one from then on."""
        num_groups = self.num_groups + 1
        return _Mean(self.mean + max(_WEIGHT, 1.0 / num_groups) * (value - self.mean), num_groups)


class LengthHistory(Learner):
    """Learns how long the responses to each prompt are, in tokens.

    A prompt of a data set is known again in every epoch. A procedural problem comes once, so what is remembered there
    is the environment's level. All follows from the sequence of observations alone: no clock, no randomness.

    Args:
        max_prompts: How many prompts (or levels of environments) it remembers; those not seen for longest are
            forgotten first.
    """

    def __init__(self, *, max_prompts: int = 10_000) -> None:
        self._max_prompts = max_prompts
        self._means: OrderedDict[_Key, _Mean] = OrderedDict()
        """The last seen at the end."""
        self._source_means: OrderedDict[str, _Mean] = OrderedDict()
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._long_above: float | None = None
        """The quantile of ``_recent``; None when that has changed since."""

    def learn(self, group: Group) -> None:
        """Learn from the rollouts of a group that came to their own end; others say too little."""
        self.observe(group.prompt, [rollout.response_tokens for rollout in group.rollouts if rollout.has_finished])

    def observe(self, prompt: Prompt, lengths: Sequence[int]) -> None:
        """Learn the lengths of one group's responses, in tokens; none teach nothing."""
        if not lengths:
            return
        length = math.fsum(lengths) / len(lengths)
        mean = self._update(self._means, _key(prompt), length)
        self._update(self._source_means, prompt.source, length)
        self._recent.append(mean)
        self._long_above = None

    def predict(self, prompt: Prompt) -> float | None:
        """Return the expected tokens of a response; None for a prompt that it does not know."""
        known = self._means.get(_key(prompt))
        return None if known is None else known.mean

    def order(self, groups: Iterable[Group]) -> list[Group]:
        """Return what is to be answered, those first whose responses will be longest.

        A prompt that is not known counts as its source's mean, one of an unknown source as the mean of all. Among
        equals the order stays.
        """
        overall = self._overall_mean()
        return sorted(groups, key=lambda group: -self._expected(group.prompt, overall))

    def is_long(self, prompt: Prompt) -> bool:
        """Whether the responses will be among the longest; a prompt that is not known is not long."""
        known = self._means.get(_key(prompt))
        return known is not None and known.mean > self._threshold()

    def state_dict(self) -> dict[str, Any]:
        """Return what it has learned as JSON values."""
        return {
            "prompts": [[*key, *mean] for key, mean in self._means.items()],
            "sources": [[source, *mean] for source, mean in self._source_means.items()],
            "recent": list(self._recent),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Know what :meth:`state_dict` returned, and nothing else; the oldest is left out where it is too much.

        Raises:
            ConfigError: If it is something else; nothing is changed.
        """
        try:
            prompts = [((str(s), str(p)), _Mean(float(m), int(n))) for s, p, m, n in state["prompts"]]
            sources = [(str(s), _Mean(float(m), int(n))) for s, m, n in state["sources"]]
            recent = [float(mean) for mean in state["recent"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the history of response lengths cannot be read ({type(error).__name__}: {error}): start a new run"
            ) from error
        self._means = OrderedDict(prompts[-self._max_prompts :])
        self._source_means = OrderedDict(sources[-self._max_prompts :])
        self._recent = deque(recent, maxlen=_RECENT)
        self._long_above = None

    def _update(self, means: OrderedDict[Any, _Mean], key: _Key | str, length: float) -> float:
        means[key] = means.pop(key, _Mean(0.0, 0)).with_value(length)
        if len(means) > self._max_prompts:
            means.popitem(last=False)
        return means[key].mean

    def _expected(self, prompt: Prompt, overall: float) -> float:
        known = self._means.get(_key(prompt)) or self._source_means.get(prompt.source)
        return overall if known is None else known.mean

    def _overall_mean(self) -> float:
        return math.fsum(self._recent) / len(self._recent) if self._recent else 0.0

    def _threshold(self) -> float:
        if self._long_above is None:
            self._long_above = float(np.quantile(self._recent, _LONG_QUANTILE))
        return self._long_above


class Placement:
    """Orders new prompts and holds long ones back.

    Without ``lengths`` nothing is ordered, without ``round_size`` there are no rounds of long prompts.
    """

    def __init__(
        self, lengths: LengthHistory | None = None, *, long_first: bool = False, round_size: int | None = None
    ) -> None:
        self.lengths = lengths
        self._long_first = long_first
        self._round_size = round_size
        self._held: list[Group] = []
        self._tail: list[Group] = []
        """What is left of the present round of long prompts."""

    @property
    def held(self) -> Sequence[Group]:
        """Prompts that wait here."""
        return [*self._tail, *self._held]

    def begin_step(self) -> None:
        """Make this step a round of long prompts if there are enough of them."""
        if self._round_size is not None and not self._tail and len(self._held) >= self._round_size:
            self._tail, self._held = self._held[: self._round_size], self._held[self._round_size :]

    def tail(self, count: int) -> list[Group]:
        """Return up to ``count`` prompts of a round of long ones; none in other steps."""
        taken, self._tail = self._tail[:count], self._tail[count:]
        return taken

    def order(self, groups: list[Group]) -> list[Group]:
        """Return new prompts in the order in which they start, without those that are held back."""
        lengths = self.lengths
        if lengths is None:
            return groups
        if self._round_size is not None:
            self._held += [group for group in groups if lengths.is_long(group.prompt)]
            groups = [group for group in groups if not lengths.is_long(group.prompt)]
        return list(lengths.order(groups)) if self._long_first else groups

    def release(self, count: int) -> list[Group]:
        """Return up to ``count`` of the prompts that are held back."""
        released, self._held = self._held[:count], self._held[count:]
        return released


def _key(prompt: Prompt) -> _Key:
    if "environment" in prompt.metadata and "level" in prompt.metadata:
        return prompt.source, f"{prompt.metadata['environment']} level {prompt.metadata['level']}"
    return prompt.source, _EPOCH.sub("", prompt.prompt_id)
