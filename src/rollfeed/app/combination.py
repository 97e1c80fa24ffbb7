"""What each section of the settings allows and the whole cannot do."""

from __future__ import annotations

from collections.abc import Iterator

from rollfeed.app.reward_keys import check_reward_key
from rollfeed.config import RolloutConfig, Settings
from rollfeed.errors import ConfigError


def check_combination(settings: Settings, config: RolloutConfig) -> None:
    """Refuse what could not work, whatever the prompts and the model.

    Raises:
        ConfigError: With what does not fit, and what to change.
    """
    for dataset in settings.prompts.datasets:
        if not config.has_reward_function and dataset.metadata_key is None and config.rm_type is None:
            raise ConfigError(
                f"prompts.datasets: nothing scores the prompts of {dataset.path}: set reward.rm_type or plugins.reward"
            )
    check_reward_key(settings, config)
    for problem in _filters_that_drop_all(settings):
        raise ConfigError(f"filters.dynamic_sampling: {problem}")


def _filters_that_drop_all(settings: Settings) -> Iterator[str]:
    own, num_samples = settings.plugins, settings.rollout.n_samples_per_prompt
    filters = {each.name: each.parameters for each in settings.filters.dynamic_sampling}
    if num_samples == 1 and "reward_std" in filters:
        yield ("reward_std drops every group of one rollout: raise rollout.n_samples_per_prompt or remove the filter")
    # Of one answer either all are correct or none; of three, at least half of them (one) or none.
    for name, most in (("all_correct", 1), ("at_least_half_correct", 3)):
        if (
            {name, "all_wrong"} <= filters.keys()
            and num_samples <= most
            and filters[name].get("threshold") == filters["all_wrong"].get("threshold")
        ):
            yield (
                f"{name} and all_wrong together drop every group of {num_samples}: raise "
                "rollout.n_samples_per_prompt or remove one of them"
            )
    longest = settings.sampling.rollout_max_response_len
    shortest = filters.get("response_length", {}).get("minimum", 0)
    if shortest > longest and not (own.generate or own.rollout or own.sample_hook):
        yield (
            f"response_length with minimum = {shortest} drops every group: no response is over "
            f"sampling.rollout_max_response_len = {longest}; lower it"
        )
