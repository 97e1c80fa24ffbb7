"""What is refused before there is a batch."""

import json
import shutil
from pathlib import Path

import pytest

from rollfeed.app import PreparedRun, check_trained_prompts, check_training, prepare
from rollfeed.config import validate_settings
from rollfeed.errors import ConfigError


def settings(**sections):
    environment = {"prompts": {"environments": [{"id": "core/copy_text"}]}}
    return validate_settings({**environment, **sections}, where="test", overrides=())


def test_an_advantage_function_that_is_asked_is_not() -> None:
    check_training(settings(plugins={"advantage": "mine:advantage"}))


@pytest.mark.parametrize("advantage", ["group_mean", "leave_one_out", "reinforce_pp_baseline"])
def test_one_answer_a_prompt_cannot_be_compared_with_others(advantage: str) -> None:
    expected = rf"n_samples_per_prompt = 1: advantage\.estimator = '{advantage}' compares .* teaches nothing: raise it"
    with pytest.raises(ConfigError, match=expected):
        check_training(settings(rollout={"n_samples_per_prompt": 1}, advantage={"estimator": advantage}))


def test_one_answer_a_prompt_is_compared_with_those_to_others() -> None:
    check_training(settings(rollout={"n_samples_per_prompt": 1}, advantage={"estimator": "reinforce_pp"}))


def test_one_answer_a_batch_teaches_nothing() -> None:
    rollout = {"n_samples_per_prompt": 1, "rollout_batch_size": 1}
    with pytest.raises(ConfigError, match="answers of one batch with each other"):
        check_training(settings(rollout=rollout, advantage={"estimator": "reinforce_pp"}))


@pytest.mark.parametrize("plugin", ["advantage", "generate", "rollout"])
def test_groups_of_one_are_left_to_functions_of_the_user(plugin: str) -> None:
    check_training(settings(rollout={"n_samples_per_prompt": 1}, plugins={plugin: "mine:function"}))


@pytest.mark.parametrize(("key", "value"), [("rollout_top_k", 1), ("rollout_top_p", 1e-9)])
def test_answers_that_are_all_the_same_teach_nothing(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"sampling\.{key} = {value}: all answers to a prompt are the same"):
        check_training(settings(sampling={key: value}))


def prepared(checkpoint: Path, folder: Path, *, context_length: int = 256, **row: object) -> PreparedRun:
    """Return a run on servers of a model that takes images."""
    model = Path(shutil.copytree(checkpoint, folder / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vision_config": {}, "max_position_embeddings": 512}))
    (folder / "a.jsonl").write_text(json.dumps({"prompt": "1+1?", "label": "2", "image": None, **row}) + "\n")
    dataset = {"path": "a.jsonl", "label_key": "label", "image_key": "image"}
    tree = {
        "model": {"checkpoint": str(model)},
        "prompts": {"datasets": [dataset]},
        "engine": {"context_length": context_length, "sglang": {"workers": ["http://127.0.0.1:1"]}},
        "reward": {"rm_type": "exact"},
    }
    return prepare(validate_settings(tree, where="test", overrides=()), folders=[folder])


def test_prompts_with_images_are_for_other_trainers(tiny_checkpoint: Path, tmp_path: Path) -> None:
    run = prepared(tiny_checkpoint, tmp_path, image="a.png")
    with pytest.raises(ConfigError, match="a/0 has images, and the trainer takes text only"):
        check_trained_prompts(run)


def test_samples_longer_than_the_trained_model_takes_are_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    run = prepared(tiny_checkpoint, tmp_path, context_length=600)
    with pytest.raises(ConfigError, match=r"samples of 600 tokens are allowed, .* takes at most 512"):
        check_trained_prompts(run)


def test_what_the_trainer_takes_is_left_alone(tiny_checkpoint: Path, tmp_path: Path) -> None:
    check_trained_prompts(prepared(tiny_checkpoint, tmp_path))
