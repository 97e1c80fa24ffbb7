"""What is refused before there is a batch."""

import pytest

from rollfeed.app import check_training
from rollfeed.config import validate_settings
from rollfeed.errors import ConfigError


def settings(**sections):
    environment = {"prompts": {"environments": [{"id": "core/copy_text"}]}}
    return validate_settings({**environment, **sections}, where="test", overrides=())


def test_an_advantage_function_that_would_not_be_asked_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"leave_one_out.*plugins\.advantage = 'mine:advantage': remove one of them"):
        check_training(settings(train={"advantage": "leave_one_out"}, plugins={"advantage": "mine:advantage"}))


def test_an_advantage_function_that_is_asked_is_not() -> None:
    check_training(settings(plugins={"advantage": "mine:advantage"}))


@pytest.mark.parametrize("advantage", ["group_mean", "leave_one_out", "reinforce_pp_baseline"])
def test_one_answer_a_prompt_cannot_be_compared_with_others(advantage: str) -> None:
    expected = rf"n_samples_per_prompt = 1: train\.advantage = '{advantage}' compares .* teaches nothing: raise it"
    with pytest.raises(ConfigError, match=expected):
        check_training(settings(rollout={"n_samples_per_prompt": 1}, train={"advantage": advantage}))


def test_one_answer_a_prompt_is_compared_with_those_to_others() -> None:
    check_training(settings(rollout={"n_samples_per_prompt": 1}, train={"advantage": "reinforce_pp"}))


def test_one_answer_a_batch_teaches_nothing() -> None:
    rollout = {"n_samples_per_prompt": 1, "rollout_batch_size": 1}
    with pytest.raises(ConfigError, match="answers of one batch with each other"):
        check_training(settings(rollout=rollout, train={"advantage": "reinforce_pp"}))


@pytest.mark.parametrize("plugin", ["advantage", "generate", "rollout"])
def test_groups_of_one_are_left_to_functions_of_the_user(plugin: str) -> None:
    check_training(settings(rollout={"n_samples_per_prompt": 1}, plugins={plugin: "mine:function"}))


def test_answers_that_are_all_the_same_teach_nothing() -> None:
    with pytest.raises(ConfigError, match=r"sampling\.rollout_top_k = 1: all answers to a prompt are the same"):
        check_training(settings(sampling={"rollout_top_k": 1}))
