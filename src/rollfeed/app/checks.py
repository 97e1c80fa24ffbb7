"""Finds what each section of the settings allows and the whole cannot do, as far as it is known before the run.

A ``reward_key`` that no reward has is refused in the first step where what scores is known only then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rollfeed.app.model import Model
from rollfeed.base.importing import is_async
from rollfeed.config import EngineSettings, RolloutConfig, RolloutMode, Settings
from rollfeed.config.reward import is_judge
from rollfeed.config.teacher import TeacherUse
from rollfeed.environments import RLVE_KEYS, RLVE_RM_TYPE
from rollfeed.errors import ConfigError
from rollfeed.faults import name_of
from rollfeed.model_files import find_config
from rollfeed.plugins import load_plugin
from rollfeed.protocols import LossFn
from rollfeed.rewards.registry import BUILTIN_GRADERS, CODE_RM_TYPE, REMOTE_RM_TYPE, grader_name

_OWN_NAMESPACE = "core/"

_KEYS: dict[str, Sequence[str]] = {
    **{rm_type: grader.keys for rm_type, grader in BUILTIN_GRADERS.items()},
    CODE_RM_TYPE: (),
    RLVE_RM_TYPE: RLVE_KEYS,
}


_SEES = ("vision", "visual", "image", "img")
"""Parts of the names in a model's configuration, one of which every model that takes images has."""


def no_images_of(settings: EngineSettings, model: Model, *, is_cluster: bool = False) -> str | None:
    """Return why an engine takes text only; None where it takes images, or only its servers know.

    On a cluster (``is_cluster``) it answers elsewhere, where the bytes of pictures are not.
    """
    remedy = "remove image_key, or use a model that takes images"
    if is_cluster:
        return "workers of [cluster] are not sent pictures: remove image_key, or [cluster]"
    if settings.sglang is None and settings.openai is None:
        needs = f"the embedded engine takes text only with a model without a processor of images: {remedy}"
        return None if model.pictures is not None else needs
    config = find_config(model.checkpoint)
    if config is not None and not any(part in key.lower() for key in config for part in _SEES):
        return f"the model in {model.checkpoint} takes text only: remove image_key, or use another model"
    if model.pictures is None:
        needs = "servers are sent pictures by the model's processor, whose files"
        return f"{needs} {model.checkpoint} lacks (preprocessor_config.json): add them, or remove image_key"
    return None


def load_loss_function(given: str | LossFn | None, *, folders: Sequence[Path] = ()) -> LossFn | None:
    """Return what ``train.loss.function`` names.

    Raises:
        ConfigError: If it cannot be imported or is no :class:`LossFn`.
    """
    if given is None:
        return None
    found = load_plugin(given, LossFn, key="train.loss.function", folders=folders)
    if is_async(found):
        raise ConfigError(f"train.loss.function ({name_of(found)}): is async; the trainer calls a plain function")
    return found


def check_combination(settings: Settings) -> None:
    """Refuse what could not work, whatever the prompts and the model.

    Raises:
        ConfigError: With what does not fit, and what to change.
    """
    for dataset in settings.prompts.datasets if settings.rollout.mode is not RolloutMode.SFT else ():
        is_scored = settings.plugins.has_reward or settings.teacher is not None
        if not is_scored and dataset.metadata_key is None and settings.reward.rm_type is None:
            raise ConfigError(
                f"prompts.datasets: nothing scores the prompts of {dataset.path}: set reward.rm_type or plugins.reward"
            )
    _check_reward_key(settings)
    judge, num_samples = settings.reward.judge_of(settings.reward.rm_type), settings.rollout.n_samples_per_prompt
    if judge is not None and judge.compares_group and num_samples == 1 and not settings.plugins.has_reward:
        raise ConfigError(
            f"reward.rm_type = {settings.reward.rm_type!r} compares the answers of a group, and "
            "rollout.n_samples_per_prompt = 1: raise it"
        )
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


def _check_reward_key(settings: Settings) -> None:
    """Refuse a key that none of the run's rewards has, where all that scores is known."""
    plugins, prompts, reward = settings.plugins, settings.prompts, settings.reward
    is_sft = settings.rollout.mode is RolloutMode.SFT
    if is_sft or plugins.has_reward or plugins.generate or plugins.prompt_source:
        return
    if any(each.metadata_key is not None for each in prompts.datasets):
        return
    problems = [reward_key_problem(reward.reward_key, reward.rm_type)] if prompts.datasets else []
    if prompts.environment_ids and reward.reward_key is not None:
        is_known = all(each.startswith(_OWN_NAMESPACE) for each in prompts.environment_ids)
        problem = f"reward_key = {reward.reward_key!r}: rewards of environments are single numbers: remove it"
        problems.append(problem if is_known else None)
    if problems and None not in problems:
        raise ConfigError(f"reward.{problems[0]}")


def reward_key_problem(reward_key: str | None, rm_type: str | None, *, is_of_others: bool = False) -> str | None:
    """Return why no reward of a grader has the key; None if one has, or may have.

    ``is_of_others`` is a key that was chosen for other graders too; single numbers count without it.
    """
    keys = None if rm_type is None else () if is_judge(rm_type) else _KEYS.get(grader_name(rm_type))
    if reward_key is None or keys is None or reward_key in keys:
        return None
    about = f"reward_key = {reward_key!r}: rewards of rm_type {rm_type!r}"
    if keys:
        return f"{about} have the keys {', '.join(sorted(keys))}: set it to one of them"
    return None if is_of_others else f"{about} are single numbers, without keys: remove it"


def needs_keyed_cut(config: RolloutConfig) -> bool:
    """Whether what scores is known only once it has: a function or a server."""
    reward, plugins = config.reward, config.plugins
    if reward.reward_key is None or plugins.generate is not None or config.rollout.mode is RolloutMode.SFT:
        return False
    if config.teacher is not None and config.teacher.use is TeacherUse.REWARD:
        return False  # rewards are the teacher's, single numbers
    return plugins.has_reward or (reward.rm_type == REMOTE_RM_TYPE and reward.reward_key != reward.remote.reply_key)
