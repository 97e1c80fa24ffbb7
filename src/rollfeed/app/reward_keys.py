"""Refuses a ``reward_key`` that no reward has: before the run where graders are known, in its first step otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rollfeed.app.rewards import CODE_RM_TYPE, REMOTE_RM_TYPE
from rollfeed.config import RolloutConfig, Settings
from rollfeed.environments import RLVE_KEYS, RLVE_RM_TYPE
from rollfeed.errors import ConfigError, RunFailedError
from rollfeed.rewards import BUILTIN_GRADERS
from rollfeed.rewards.registry import grader_name
from rollfeed.rewards.results import REWARD_KEY
from rollfeed.types import BatchCut, ByAge, Group

_OWN_NAMESPACE = "core/"

_KEYS: dict[str, Sequence[str]] = {
    **{rm_type: grader.keys for rm_type, grader in BUILTIN_GRADERS.items()},
    CODE_RM_TYPE: (),
    RLVE_RM_TYPE: RLVE_KEYS,
}


def check_reward_key(settings: Settings, config: RolloutConfig) -> None:
    """Refuse a key that none of the run's rewards has, where all that scores is known.

    Raises:
        ConfigError: With the keys there are.
    """
    plugins, prompts = settings.plugins, settings.prompts
    has_function = any((config.reward, config.batched_reward, config.group_reward, config.generate))
    if has_function or plugins.prompt_source or any(each.metadata_key is not None for each in prompts.datasets):
        return
    problems = [reward_key_problem(config.reward_key, config.rm_type)] if prompts.datasets else []
    if prompts.environments and config.reward_key is not None:
        is_known = all(each.id.startswith(_OWN_NAMESPACE) for each in prompts.environments)
        problem = f"reward_key = {config.reward_key!r}: rewards of environments are single numbers: remove it"
        problems.append(problem if is_known else None)
    if problems and None not in problems:
        raise ConfigError(f"reward.{problems[0]}")


def reward_key_problem(reward_key: str | None, rm_type: str | None, *, is_of_others: bool = False) -> str | None:
    """Return why no reward of a grader has the key; None if one has, or may have.

    Args:
        reward_key: Which of named numbers counts.
        rm_type: The grader.
        is_of_others: The key was chosen for other graders too, and single numbers count without it.
    """
    keys = None if rm_type is None else _KEYS.get(grader_name(rm_type))
    if reward_key is None or keys is None or reward_key in keys:
        return None
    about = f"reward_key = {reward_key!r}: rewards of rm_type {rm_type!r}"
    if keys:
        return f"{about} have the keys {', '.join(sorted(keys))}: set it to one of them"
    return None if is_of_others else f"{about} are single numbers, without keys: remove it"


class KeyedCut:
    """Cuts batches; until a reward was named numbers, refuses a batch in which none is.

    Args:
        cut: Makes the batch.
        reward_key: Which of named numbers counts.
    """

    def __init__(self, cut: Callable[..., BatchCut | ByAge], *, reward_key: str) -> None:
        self._cut = cut
        self._reward_key = reward_key
        self._has_found = False

    def __call__(self, groups: Sequence[Group], *, step: int, **about: Any) -> BatchCut | ByAge:
        """Return the batch, or what is too old for it.

        Raises:
            RunFailedError: If no reward has entries.
        """
        if not self._has_found:
            rewards = [sample.reward for group in groups if _takes_key_of_run(group) for sample in group.samples]
            self._has_found = any(isinstance(reward, dict) for reward in rewards)
            if rewards and not self._has_found:
                raise RunFailedError(
                    f"reward_key = {self._reward_key!r}: none of the {len(rewards)} rewards of step {step} has keys, "
                    "each is a single number: remove it, or let what scores return named numbers"
                )
        return self._cut(groups, step=step, **about)


def needs_keyed_cut(config: RolloutConfig) -> bool:
    """Whether what scores is known only once it has: a function or a server."""
    if config.reward_key is None or config.generate is not None:
        return False
    has_function = any((config.reward, config.batched_reward, config.group_reward))
    is_remote = config.rm_type == REMOTE_RM_TYPE and config.reward_key != config.remote_reward.reply_key
    return has_function or is_remote


def _takes_key_of_run(group: Group) -> bool:
    metadata = group.prompt.metadata
    return not any(metadata.get(name) is not None for name in (REWARD_KEY, "reward_fn", "rm_type"))
