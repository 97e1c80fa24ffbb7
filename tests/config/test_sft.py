"""`rollout.mode = "sft"`: what it sets by itself, and settings that say something of sampled answers."""

from typing import Any

import pytest

from rollfeed.config import RolloutConfig, Settings, read_stored, stored_identity, validate_settings
from rollfeed.config.train import Correction, Objective
from rollfeed.errors import ConfigError

PROMPTS = {"datasets": [{"path": "talks.jsonl", "input_key": "messages"}]}


def settings_of(**tree: Any) -> Settings:
    rollout = {"mode": "sft", **tree.pop("rollout", {})}
    return validate_settings({"prompts": PROMPTS, **tree, "rollout": rollout}, where="test")


def test_a_group_has_one_answer_and_the_loss_is_cross_entropy() -> None:
    settings = settings_of(train={"loss": {"normalisation": "sequence"}})
    assert settings.rollout.n_samples_per_prompt == 1
    assert settings.rollout.max_staleness == 0
    assert settings.train.loss.objective is Objective.CROSS_ENTROPY
    assert settings.train.loss.normalisation == "sequence"
    assert settings.train.loss.correction is Correction.NONE


def test_what_a_run_has_stored_is_read_as_it_was() -> None:
    settings = settings_of(rollout={"loss_mask_type": "qwen3"}, train={"checkpoint_interval": 3})
    stored = settings.model_dump(mode="json")
    assert read_stored(stored, where="stored") == settings
    assert stored_identity(stored) == settings.identity()


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"rollout": {"n_samples_per_prompt": 4}}, r"rollout: n_samples_per_prompt = 4: a conversation has one answer"),
        ({"rollout": {"over_sampling_factor": 2.0}}, "rollout: over_sampling_factor = 2.0 has no effect with mode"),
        ({"rollout": {"surplus": "drop"}}, "rollout: surplus = drop has no effect with mode = 'sft'"),
        ({"rollout": {"mask_truncated": True}}, "rollout: mask_truncated = True has no effect"),
        ({"rollout": {"loss_mask_type": "qwen9"}}, "rollout.loss_mask_type"),
        ({"train": {"loss": {"kl_coefficient": 0.1}}}, r"train\.loss\.kl_coefficient has no effect with rollout\.mode"),
        ({"train": {"loss": {"clip_high": 0.3}}}, r"train\.loss\.clip_high has no effect"),
        ({"train": {"loss": {"correction": "truncate"}}}, r"train\.loss\.correction has no effect"),
        ({"train": {"loss": {"objective": "clip"}}}, r"train\.loss\.objective = 'clip' compares policies"),
        ({"train": {"method": "grpo"}}, r"train\.method has no effect"),
        ({"train": {"routing_replay": True}}, r"train\.routing_replay has no effect"),
        ({"train": {"warm_up": {"stop_accuracy": 0.5}}}, r"train\.warm_up has no effect"),
        ({"filters": {"dynamic_sampling": [{"name": "reward_std"}]}}, r"filters\.dynamic_sampling has no effect"),
        ({"advantage": {"divide_by_std": True}}, r"advantage\.divide_by_std has no effect"),
        ({"plugins": {"generate": "mine:generate"}}, r"plugins\.generate has no effect"),
        ({"prompts": {}, "plugins": {"prompt_source": "mine:source"}}, r"plugins\.prompt_source has no effect"),
        ({"sampling": {"return_sampling_mask": True, "rollout_top_k": 5}}, r"sampling\.return_sampling_mask has no"),
        ({"weights": {"source": "directory", "directory": "/w"}}, r"weights\.source has no effect"),
        ({"prompts": {"environments": [{"id": "core/copy_text"}]}}, r"prompts\.environments has no effect"),
        (
            {"prompts": {"datasets": [{"path": "talks.jsonl", "image_key": "images"}]}},
            "learns text only: remove image_key",
        ),
    ],
)
def test_what_says_something_of_sampled_answers_is_refused_by_name(tree: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        settings_of(**tree)


@pytest.mark.parametrize(
    ("train", "name"),
    [
        ({"loss": {"router_aux_loss_coefficient": 0.01}}, r"loss\.router_aux_loss_coefficient"),
        ({"loss": {"normalisation": "sequence"}}, r"loss\.normalisation"),
        ({"head_precision": "fp32"}, "head_precision"),
    ],
    ids=str,
)
def test_what_says_something_of_tokens_is_refused_of_pairs(train: dict[str, Any], name: str) -> None:
    assert settings_of(train=train).train.changed_values()
    with pytest.raises(ConfigError, match=rf"train\.{name} has no effect with train\.kind = 'reward_model'"):
        settings_of(rollout={}, train={"kind": "reward_model", **train})


@pytest.mark.parametrize("mode", ["sync", "partial", "async"])
def test_where_answers_are_sampled_nothing_of_it_can_be_set(mode: str) -> None:
    with pytest.raises(ConfigError, match=r"loss_mask_type = qwen3 has no effect with mode = '\w+'"):
        settings_of(rollout={"mode": mode, "loss_mask_type": "qwen3"})
    with pytest.raises(ConfigError, match=r"objective = 'cross_entropy' is for answers that data sets bring"):
        settings_of(rollout={"mode": mode}, train={"loss": {"objective": "cross_entropy"}})


def test_a_manager_refuses_the_same() -> None:
    with pytest.raises(ValueError, match=r"plugins\.generate has no effect with rollout\.mode = 'sft'"):
        RolloutConfig(rollout={"mode": "sft"}, plugins={"generate": "mine:generate"})


def test_a_conversation_may_fill_the_context() -> None:
    settings = settings_of(engine={"context_length": 40})
    assert settings.max_prompt_length == settings.max_sample_length == 40


def test_an_engine_is_needed_for_evaluations_of_a_training_only() -> None:
    sets = {"datasets": [{"name": "held", "path": "held.jsonl", "rm_type": "exact"}]}
    assert not settings_of().needs_engine
    assert not settings_of(train={}).needs_engine
    assert settings_of(train={}, eval=sets).needs_engine
    assert not settings_of(eval=sets).needs_engine
    assert settings_of(rollout={"mode": "sync"}).needs_engine
