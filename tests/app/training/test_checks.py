"""What is refused before there is a batch."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file
from tests.training.test_routing_replay import CONFIGS

from rollfeed.app import PreparedRun, prepare
from rollfeed.app.training.checks import (
    check_published,
    check_sampling_masks,
    check_trained_model,
    check_trained_prompts,
    check_training,
    tell_of_correction,
)
from rollfeed.config import RunSpec, validate_settings
from rollfeed.errors import ConfigError
from rollfeed.testing import make_group
from rollfeed.types import Picture, SamplingMask, TrainBatch


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


def test_divergence_in_rewards_needs_an_estimator() -> None:
    train = {"loss": {"reward_kl_coefficient": 0.1}}
    check_training(settings(train=train))
    with pytest.raises(ConfigError, match=r"of which plugins\.advantage makes advantages before the trainer knows"):
        check_training(settings(train=train, plugins={"advantage": "mine:advantage"}))
    teacher = {"checkpoint": "teacher"}
    check_training(settings(train=train, teacher={**teacher, "use": "reward"}))
    with pytest.raises(ConfigError, match=r"with teacher\.use = 'loss' advantages are the teacher's"):
        check_training(settings(train=train, teacher=teacher))


@pytest.mark.parametrize(("key", "value"), [("rollout_top_k", 1), ("rollout_top_p", 1e-9)])
def test_answers_that_are_all_the_same_teach_nothing(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"sampling\.{key} = {value}: all answers to a prompt are the same"):
        check_training(settings(sampling={key: value}))


RESTRICTED = [("rollout_top_p", 0.95), ("rollout_top_k", 20), ("min_new_tokens", 3), ("repetition_penalty", 1.1)]


@pytest.mark.parametrize(("key", "value"), RESTRICTED)
@pytest.mark.parametrize("loss", [{"correction": "truncate"}, {"correction": "mask"}, {"old_logprobs": "rollout"}])
def test_ratios_of_two_distributions_are_refused(key: str, value: float, loss: dict[str, str]) -> None:
    [(name, choice)] = loss.items()
    said = rf"train\.loss\.{name} = '{choice}': with sampling\.{key} = {value} .*: leave it out, or set sampling\.{key}"
    with pytest.raises(ConfigError, match=f"{said} back"):
        check_training(settings(sampling={key: value}, train={"loss": loss}))


def told(caplog: pytest.LogCaptureFixture, **sections: object) -> list[tuple[str, str]]:
    """Return level and message of each line that is logged of settings that can be trained with."""
    given = settings(**sections)
    check_training(given)
    with caplog.at_level("INFO", logger="rollfeed"):
        tell_of_correction(given)
    return [(record.levelname, record.getMessage()) for record in caplog.records]


@pytest.mark.parametrize(("key", "value"), RESTRICTED)
@pytest.mark.parametrize("mode", ["sync", "partial", "async"])
def test_the_default_correction_is_off_under_restricted_sampling_with_a_warning(
    key: str, value: float, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    sections = {"sampling": {key: value}, "rollout": {"mode": mode}}
    assert settings(**sections).train.loss.correction == "none"
    [(level, message)] = told(caplog, **sections)
    assert level == "WARNING"
    assert message.startswith(f"sampling.{key} = {value}: ")
    assert "train.loss.correction is off" in message


@pytest.mark.parametrize(("mode", "correction"), [("sync", "none"), ("partial", "truncate"), ("async", "truncate")])
def test_stale_rollouts_are_corrected_by_default_and_the_log_says_so(
    mode: str, correction: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = settings(rollout={"mode": mode}, train={})
    assert given.train.loss.correction == correction
    assert given.model_dump(mode="json")["train"]["loss"]["correction"] == correction
    said = told(caplog, rollout={"mode": mode})
    if correction == "none":
        assert said == []
    else:
        [(level, message)] = said
        assert level == "INFO"
        assert message.startswith(f"rollout.mode = {mode}: tokens weigh what the trainer's probability is over")
        assert "at most 2 (train.loss.correction = 'truncate')" in message


def test_sampling_masks_make_restricted_sampling_comparable_but_for_penalties(caplog: pytest.LogCaptureFixture) -> None:
    sampling = {"rollout_top_p": 0.95, "rollout_top_k": 100, "min_new_tokens": 2, "return_sampling_mask": True}
    asynchronous = {"rollout": {"mode": "async"}}
    assert settings(sampling=sampling, **asynchronous).train.loss.correction == "truncate"
    check_training(settings(sampling=sampling, train={"loss": {"old_logprobs": "rollout"}}))
    [(level, message)] = told(caplog, sampling={**sampling, "repetition_penalty": 1.1}, **asynchronous)
    assert (level, message.partition(":")[0]) == ("WARNING", "sampling.repetition_penalty = 1.1")


def test_samples_that_do_not_say_what_they_were_drawn_from_are_named() -> None:
    group, masked = make_group([0.0]), SamplingMask.of([[52]])
    [rollout] = group.rollouts
    [sample] = rollout.samples
    told = replace(group, rollouts=(replace(rollout, samples=(replace(sample, sampling_mask=masked),)),))
    batch = TrainBatch(step=0, policy_version=0, groups=(told,), advantages_S=np.zeros(1, np.float32), metrics={})
    check_sampling_masks(batch)
    with pytest.raises(ConfigError, match=r"sample 0 has no sampling_mask, .* have plugins\.generate keep it"):
        check_sampling_masks(replace(batch, groups=(group,)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "rollout_top_k = -1 does not bound it: set rollout_top_k from 2 to 4096"),
        ({"rollout_top_k": 4097}, "rollout_top_k = 4097 does not bound it"),
    ],
)
def test_sampling_masks_are_bounded(changes: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings(sampling={"return_sampling_mask": True, **changes})


def test_servers_that_return_no_sampling_masks_are_not_asked_for_them() -> None:
    servers = {"openai": {"base_url": "http://127.0.0.1:1"}}
    with pytest.raises(ConfigError, match=r"servers of \[engine\.openai\] return none: set it to false"):
        settings(sampling={"return_sampling_mask": True, "rollout_top_k": 9}, engine=servers)


def test_routing_replay_has_an_engine_that_returns_experts() -> None:
    replay = {"routing_replay": True}
    with pytest.raises(ConfigError, match=r"set sampling\.return_routed_experts = true"):
        settings(train=replay)
    returned = {"return_routed_experts": True}
    assert settings(train=replay, sampling=returned).sampling.params.return_routed_experts
    settings(train=replay, sampling=returned, engine={"openai": {"base_url": "http://127.0.0.1:1"}})
    with pytest.raises(ConfigError, match="set compile = false"):
        settings(train={**replay, "compile": True}, sampling=returned)


@pytest.mark.parametrize("loss", [{"correction": "none"}, {"correction": "mask"}, {"old_logprobs": "rollout"}])
def test_a_correction_that_is_set_is_kept(loss: dict[str, str]) -> None:
    given = settings(rollout={"mode": "async"}, train={"loss": loss}).train.loss
    assert given.correction == loss.get("correction", "none")


def prepared(checkpoint: Path, folder: Path, *, context_length: int = 256, **row: object) -> PreparedRun:
    """Return a run on servers of a model that takes images."""
    model = Path(shutil.copytree(checkpoint, folder / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vision_config": {}, "max_position_embeddings": 512}))
    (folder / "a.jsonl").write_text(json.dumps({"prompt": "1+1?", "label": "2", "image": None, **row}) + "\n")
    dataset = {"path": "a.jsonl", "label_key": "label", "image_key": "image", "apply_chat_template": False}
    tree = {
        "model": {"checkpoint": str(model)},
        "prompts": {"datasets": [dataset]},
        "engine": {"context_length": context_length, "sglang": {"workers": ["http://127.0.0.1:1"]}},
        "reward": {"rm_type": "exact"},
    }
    return prepare(RunSpec(validate_settings(tree, where="test", overrides=()), (folder,)))


def check_prompts(run: PreparedRun) -> None:
    check_trained_prompts(run.settings, run.dataset_prompts, run.model.checkpoint, takes_pictures=False)


def test_prompts_with_images_are_for_models_that_see(tiny_checkpoint: Path, tmp_path: Path) -> None:
    run = prepared(tiny_checkpoint, tmp_path)
    shown = [replace(each, images=(Picture.from_text("a.png"),)) for each in run.dataset_prompts]
    with pytest.raises(ConfigError, match="a/0 has images, and the model that is trained takes text only"):
        check_trained_prompts(run.settings, shown, run.model.checkpoint, takes_pictures=False)
    several = run.settings.train.model_copy(update={"num_processes": 2})
    settings = run.settings.model_copy(update={"train": several})
    with pytest.raises(ConfigError, match="a/0 has images, which several processes are not trained on"):
        check_trained_prompts(settings, shown, run.model.checkpoint, takes_pictures=True)


def test_samples_longer_than_the_trained_model_takes_are_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    run = prepared(tiny_checkpoint, tmp_path, context_length=600)
    with pytest.raises(ConfigError, match=r"samples of 600 tokens are allowed, .* takes at most 512"):
        check_prompts(run)


def test_what_the_trainer_takes_is_left_alone(tiny_checkpoint: Path, tmp_path: Path) -> None:
    check_prompts(prepared(tiny_checkpoint, tmp_path))


@pytest.mark.parametrize(("transport", "is_refused"), [("tensors", True), ("nccl", True), ("disk", False)])
def test_a_trainer_of_other_tensors_than_servers_have_is_refused(
    tiny_checkpoint: Path, transport: str, is_refused: bool
) -> None:
    table = {"workers": ["http://a:1"], "weights_transport": transport}
    served = settings(engine={"sglang": table})
    tensors = load_file(tiny_checkpoint / "model.safetensors")
    check_published(tensors, served, tiny_checkpoint)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    if not is_refused:
        check_published(tensors, served, tiny_checkpoint)
        return
    with pytest.raises(ConfigError, match=r"'model\.layers\.0\.mlp\.up_proj\.weight' is missing"):
        check_published(tensors, served, tiny_checkpoint)


def test_balance_needs_a_model_whose_routers_are_balanced_by_a_loss_and_looked_into(tmp_path: Path) -> None:
    transformers.AutoModelForCausalLM.from_config(CONFIGS["groups"]()).save_pretrained(tmp_path)
    train = {"loss": {"router_aux_loss_coefficient": 0.01}}
    asked = settings(train=train, model={"checkpoint": str(tmp_path)})
    message = (
        r"router_aux_loss_coefficient = 0\.01: transformers computes no .* loss of DeepseekV3ForCausalLM: remove it"
    )
    with pytest.raises(ConfigError, match=message):
        check_trained_model(asked, tmp_path)
    with pytest.raises(ConfigError, match="router_aux_loss_coefficient looks into routers: set compile = false"):
        settings(train={**train, "compile": True})


@pytest.mark.parametrize("train", [{"routing_replay": True}, {"loss": {"router_aux_loss_coefficient": 0.01}}], ids=str)
def test_what_is_asked_of_experts_needs_some(tiny_checkpoint: Path, train: dict[str, object]) -> None:
    asked = settings(train=train, sampling={"return_routed_experts": True}, model={"checkpoint": str(tiny_checkpoint)})
    key = next(iter(train))
    with pytest.raises(ConfigError, match=rf"train\.{key}.*: the model has no experts by its configuration: remove it"):
        check_trained_model(asked, tiny_checkpoint)
