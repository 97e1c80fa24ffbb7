"""Environments of ``[prompts.adaptive]`` as a prompt source."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from rollfeed.app.environments.task_makers import ChosenEnvironment, MakingPlan, ask_maker, one_worker
from rollfeed.app.environments.ways_of_asking import check_asking
from rollfeed.config import AdaptiveSettings, DifficultyPolicyName, EnvironmentSettings, Settings
from rollfeed.config.plugins import import_path_of
from rollfeed.environments.adaptive_source import AdaptiveSource
from rollfeed.environments.difficulty import (
    BandPolicy,
    DifficultyManager,
    FixedPolicy,
    LearningProgressPolicy,
    RlvePolicy,
)
from rollfeed.environments.levels import EnvironmentLevels
from rollfeed.environments.making import EnvironmentFacts
from rollfeed.environments.tasks import check_level
from rollfeed.errors import ConfigError, PluginError
from rollfeed.plugins import load_factory
from rollfeed.prompts import ChatRenderer, MixtureSource
from rollfeed.protocols import DifficultyPolicy, PromptSource

_log = logging.getLogger(__name__)

_POLICIES = {
    DifficultyPolicyName.BAND: BandPolicy,
    DifficultyPolicyName.LEARNING_PROGRESS: LearningProgressPolicy,
    DifficultyPolicyName.FIXED: FixedPolicy,
}
_OWN = "plugins.difficulty_policy"
_MAX_SECONDS = 30.0
"""For the first problems of all environments, when settings are checked."""


def adaptive_source(
    adaptive: AdaptiveSettings, settings: Settings, plan: MakingPlan, renderer: ChatRenderer
) -> AdaptiveSource:
    """Return the source of the environments of ``adaptive``, which is part of ``settings``.

    Raises:
        ConfigError: If there is no such environment or level, or a policy of the user's cannot be made.
    """
    chosen = [
        EnvironmentSettings(id=each, parameters=adaptive.parameters.get(each, {})) for each in adaptive.environment_list
    ]
    makers = plan.make([ChosenEnvironment(each.id, each.parameters) for each in chosen], seed=settings.seed)
    for each, maker in zip(chosen, makers, strict=True):
        check_level(maker.facts, adaptive.initial_difficulty)
        check_asking(maker.facts, each, adaptive)
    manager = _manager(adaptive, settings, [maker.facts for maker in makers], folders=plan.folders)
    levels = [
        EnvironmentLevels(
            maker, renderer=renderer, source=AdaptiveSource.name, apply_chat_template=adaptive.apply_chat_template
        )
        for maker in makers
    ]
    return AdaptiveSource(levels, manager=manager)


@one_worker()
def check_adaptive_environments(source: PromptSource, settings: Settings) -> None:
    """Make the first problem of each environment of ``[prompts.adaptive]``, and forget that; none is begun after 30 s.

    Raises:
        ConfigError: If there are some whose level ``initial_difficulty`` a run would give up, a line each.
    """
    adaptive, problems, ends_at = settings.prompts.adaptive, list[str](), time.monotonic() + _MAX_SECONDS
    if adaptive is None or not isinstance(source, MixtureSource):
        return
    waiting = [each for one in source.sources if isinstance(one, AdaptiveSource) for each in one.levels]
    while waiting and time.monotonic() < ends_at:
        levels = waiting.pop(0)
        try:
            ask_maker(levels.maker, partial(levels.check, adaptive.initial_difficulty))
        except ConfigError as error:
            problems.append(f"prompts.adaptive: {error}, or take it out of environment_list")
    if waiting:
        untried = f"{len(waiting)} environments from {waiting[0].facts.environment_id} on are not tried"
        _log.warning("prompts.adaptive: %s: those before took %.0f s", untried, _MAX_SECONDS)
    if problems:
        raise ConfigError("\n".join(problems))


def _manager(
    adaptive: AdaptiveSettings, settings: Settings, environments: Iterable[EnvironmentFacts], *, folders: Sequence[Path]
) -> DifficultyManager:
    own = settings.plugins.difficulty_policy
    counts_all = own is None and adaptive.policy is DifficultyPolicyName.RLVE
    return DifficultyManager(
        {each.environment_id: each.version for each in environments},
        policy_name=adaptive.policy.value if own is None else import_path_of(own),
        make_policy=lambda: _policy(adaptive, settings, folders),
        seed=settings.seed,
        weight_by_spread=adaptive.weight_by_spread,
        max_staleness=None if counts_all else adaptive.max_observation_staleness,
    )


def _policy(adaptive: AdaptiveSettings, settings: Settings, folders: Sequence[Path]) -> DifficultyPolicy:
    own, window = settings.plugins.difficulty_policy, adaptive.difficulty_sliding_window_size
    level = adaptive.initial_difficulty
    if own is not None:
        made = load_factory(own, DifficultyPolicy, level, window, key=_OWN, folders=folders)
        if type(getattr(made, "level", None)) is not int:
            raise PluginError(f"{_OWN} = {import_path_of(own)!r}: what it makes has no level, a whole number")
        return made
    if adaptive.policy is not DifficultyPolicyName.RLVE:
        return _POLICIES[adaptive.policy](level, window)
    return RlvePolicy(
        level,
        window,
        least_accuracy=adaptive.min_metric_to_increase_difficulty,
        least_rollouts=adaptive.min_prompts_before_difficulty_check * settings.rollout.n_samples_per_prompt,
    )
