"""All environments of an adaptive run: which one a draw takes, at which level, and what is learned of the answers.

Invariant: what a draw takes depends on the run's seed, the number of the draw and what was learned up to the last
commit, and on no random state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from rollfeed.environments.difficulty.adapting import AdaptingEnvironment
from rollfeed.protocols import DifficultyPolicy
from rollfeed.seeds import choose, derive_seed
from rollfeed.types import Group

_log = logging.getLogger(__name__)

_LEAST_SHARE = 0.05
"""Weight of an environment none of whose groups has spread, next to 1 for one all of whose groups have."""


class DifficultyManager:
    """Chooses environments and levels: environments uniformly, or by what their groups teach; levels by a policy each.

    Args:
        versions: Of the environments in use, by id.
        policy_name: Tells states of one policy from those of others.
        make_policy: Makes one environment's policy.
        seed: The run's.
        weight_by_spread: Whether environments count by their shares of groups with right and wrong answers.
        max_staleness: How many versions the oldest token of a group may be behind the newest one seen, for the group to
            count; None for any number.
    """

    def __init__(
        self,
        versions: Mapping[str, int],
        *,
        policy_name: str,
        make_policy: Callable[[], DifficultyPolicy],
        seed: int,
        weight_by_spread: bool = False,
        max_staleness: int | None = None,
    ) -> None:
        self.environments = {
            name: AdaptingEnvironment(version=version, policy=make_policy()) for name, version in versions.items()
        }
        self.newest_version = 0
        """Of the policy, among all tokens seen."""
        self.policy_name = policy_name
        self._seed = seed
        self._weight_by_spread = weight_by_spread
        self._max_staleness = max_staleness
        self._has_warned = False

    def choose(self, number: int, *, hardest: Mapping[str, int | None]) -> tuple[str, int]:
        """Return the environment and the level of draw ``number``.

        ``hardest`` are the environments that can be drawn from, at least one, each with the hardest level that can be.
        """
        weights = {
            name: _LEAST_SHARE + (1 - _LEAST_SHARE) * self.environments[name].spread if self._weight_by_spread else 1.0
            for name in hardest
        }
        name = choose(weights, derive_seed(self._seed, "environment", number))
        levels = self.environments[name].weights(hardest=hardest[name])
        return name, choose(levels, derive_seed(self._seed, "level", number))

    def observe(self, group: Group) -> None:
        """Learn of a scored group, by the environment and the level that its prompt names.

        An environment that is not in use or of another version, and answers of a policy that is too old, teach nothing.
        """
        metadata = group.prompt.metadata
        environment, level = self.environments.get(str(metadata.get("environment"))), metadata.get("level")
        if environment is None or not isinstance(level, int) or metadata.get("version") != environment.version:
            return
        versions = group.policy_versions
        self.newest_version = max([self.newest_version, *versions])
        oldest = min(versions, default=self.newest_version)
        if self._max_staleness is not None and oldest < self.newest_version - self._max_staleness:
            return
        if not environment.observe(group, level) and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "environment %s: no verdict says whether answers are right, so that its difficulty cannot follow them: "
                "have the reward function return a Verdict with correct, or remove it",
                metadata["environment"],
            )

    def end_step(self, *, hardest: Mapping[str, int | None]) -> dict[str, float]:
        """Have every policy change its level after the groups of a step, and return what there is to log."""
        metrics: dict[str, float] = {}
        for name, environment in self.environments.items():
            before = environment.policy.level
            accuracy = environment.end_step(hardest=hardest[name])
            if accuracy is not None:
                #: RLVE/<environment>/accuracy: share of right answers at the hardest level, where it was looked at
                metrics[f"RLVE/{name}/accuracy"] = accuracy
            if environment.policy.level != before:
                #: RLVE/<environment>/difficulty: the hardest level, where it has changed
                metrics[f"RLVE/{name}/difficulty"] = float(environment.policy.level)
        return metrics
