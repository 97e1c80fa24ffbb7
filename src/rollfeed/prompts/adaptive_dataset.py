"""A data set of which rows that are always or never solved are asked less often."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

from rollfeed.prompts.dataset import DatasetSource, LoadedPrompts
from rollfeed.prompts.row_estimates import RowEstimates
from rollfeed.seeds import derive_seed
from rollfeed.types import Group, Prompt

_log = logging.getLogger(__name__)


class AdaptiveDatasetSource(DatasetSource):
    """Goes over the rows as a plain data set does, and passes over those whose groups teach little.

    Whether a row is asked when its turn comes depends on the seed, the epoch, the row and what was learned up to the
    last commit; :class:`~rollfeed.prompts.row_estimates.RowEstimates` gives the chance. It learns from what verdicts
    call right or wrong, not from rewards.
    """

    def __init__(
        self,
        loaded: LoadedPrompts,
        *,
        group_size: int,
        seed: int,
        rollout_shuffle: bool = False,
        num_epoch: int | None = None,
    ) -> None:
        super().__init__(loaded, seed=seed, rollout_shuffle=rollout_shuffle, num_epoch=num_epoch)
        self._estimates = RowEstimates(len(loaded.prompts), group_size=group_size)
        self._num_passed_over = 0
        self._has_warned = False

    def learn(self, group: Group) -> None:
        """Learn of a scored group, which answers to its prompt were right."""
        judged = group.judged()
        if judged:
            index = bisect_left(self.prompts, _row_of(group.prompt), key=_row_of)
            self._estimates.observe(index, judged, version=max(group.policy_versions, default=-1))
        elif not self._has_warned:
            self._has_warned = True
            _log.warning(
                "data set %s: no verdict says whether answers are right, so that all its rows are drawn alike: have "
                "the reward function return a Verdict with correct, or set adaptive = false",
                self.name,
            )

    def end_step(self) -> None:
        """Conclude from the groups of a step."""
        self._estimates.end_step()

    def metrics(self) -> dict[str, float]:
        """Return how many rows have been answered and passed over so far."""
        return {
            #: datasets/<name>/num_known: rows of an adaptive data set that have been answered, and not only asked
            f"datasets/{self.name}/num_known": float(self._estimates.num_known),
            #: datasets/<name>/num_passed_over: times that a row was not asked in its turn since the run began
            f"datasets/{self.name}/num_passed_over": float(self._num_passed_over),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what was learned."""
        return {
            **super().state_dict(),
            "num_passed_over": self._num_passed_over,
            "estimates": self._estimates.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position that :meth:`state_dict` returned. Raises ConfigError as a plain data set does."""
        super().load_state_dict(state)
        self._num_passed_over = state["num_passed_over"]
        self._estimates.load_state_dict(state["estimates"])

    def _asks(self, index: int) -> bool:
        point = derive_seed(self._seed, "row", self.name, self._epoch, index) / 2**64
        asks = point < self._estimates.chance(index)
        self._num_passed_over += not asks
        return asks


def _row_of(prompt: Prompt) -> int:
    """Return the row of the file that a prompt is of, in whichever epoch."""
    return int(prompt.prompt_id.rpartition("/")[2].partition("@")[0])
