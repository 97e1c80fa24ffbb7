"""What ``train.method`` sets, and what stays as it was given."""

from __future__ import annotations

from typing import Any

import pytest

from rollfeed.config import Settings, read_stored, stored_identity, validate_settings
from rollfeed.config.method import Method
from rollfeed.config.train import LossSettings, TrainSettings
from rollfeed.errors import ConfigError

PROMPTS = {"prompts": {"environments": [{"id": "core/copy_text"}]}}


def settings_of(*overrides: str, **tables: Any) -> Settings:
    return validate_settings({**PROMPTS, **tables}, where="test", overrides=overrides)


RESOLVED = {
    "grpo": ("group_mean", True, "clip", "token", 0.2, 0.2, 0.0, "sequence", None),
    "dr_grpo": ("group_mean", False, "clip", "token", 0.2, 0.2, 0.0, "constant", None),
    "dapo": ("group_mean", True, "clip", "token", 0.2, 0.28, 3.0, "token", None),
    "gspo": ("group_mean", True, "clip", "sequence", 3e-4, 4e-4, 3.0, "sequence", None),
    "reinforce_pp": ("reinforce_pp", False, "clip", "token", 0.2, 0.2, 0.0, "token", None),
    "rloo": ("leave_one_out", False, "clip", "token", 0.2, 0.2, 0.0, "constant", 1),
    "cispo": ("group_mean", True, "cispo", "token", 1.0, 4.0, 0.0, "token", None),
}


@pytest.mark.parametrize("method", Method)
def test_a_method_sets_loss_normalisation_and_advantage_together(method: str) -> None:
    settings = settings_of(train={"method": method})
    advantage, loss = settings.advantage, settings.train.loss
    assert (
        *(advantage.estimator, advantage.divide_by_std, loss.objective, loss.ratio, loss.clip_low, loss.clip_high),
        *(loss.dual_clip, loss.normalisation, loss.constant_length),
    ) == RESOLVED[method]
    assert TrainSettings(method=method).loss == loss


@pytest.mark.parametrize("method", Method)
def test_single_keys_stay_on_top_of_a_method(method: str) -> None:
    overrides = ("train.loss.clip_high=0.5", "train.loss.normalisation=token", "train.loss.kl_coefficient=0.04")
    loss = settings_of(*overrides, train={"method": method}).train.loss
    assert (loss.clip_high, loss.normalisation, loss.kl_coefficient) == (0.5, "token", 0.04)
    assert loss.ratio == RESOLVED[method][3]
    of_file = settings_of(train={"method": method, "loss": {"clip_high": 0.5, "normalisation": "token"}}).train.loss
    assert of_file.clip_high == 0.5
    assert TrainSettings(method=method, loss=LossSettings(clip_high=0.5)).loss.clip_high == 0.5


@pytest.mark.parametrize("method", Method)
def test_another_estimator_or_function_stays_on_top_of_a_method(method: str) -> None:
    advantage = settings_of("advantage.estimator=reinforce_pp_baseline", train={"method": method}).advantage
    assert (advantage.estimator, advantage.divide_by_std) == ("reinforce_pp_baseline", False)
    assert settings_of(train={"method": method}, plugins={"advantage": "mine:advantage"}).train.method == method
    undivided = settings_of("advantage.divide_by_std=false", train={"method": "grpo"}).advantage
    assert (undivided.estimator, undivided.divide_by_std) == ("group_mean", False)


def test_a_method_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.method = 'ppo': input should be 'grpo', 'dr_grpo'"):
        settings_of(train={"method": "ppo"})


def test_a_method_decides_what_a_run_is_by_the_keys_that_it_sets() -> None:
    by_method = settings_of(train={"method": "grpo"})
    by_keys = settings_of(advantage={"divide_by_std": True}, train={"loss": {"normalisation": "sequence"}})
    assert by_method.identity() == by_keys.identity() != settings_of(train={"method": "dapo"}).identity()
    assert read_stored(by_method.model_dump(mode="json"), where="stored") == by_method


@pytest.mark.parametrize(
    ("loss", "expected"),
    [({}, 0.0), ({"clip_high": 0.28}, 3.0), ({"clip_high": 0.28, "dual_clip": 0}, 0.0), ({"dual_clip": 5}, 5.0)],
)
def test_dual_clip_is_3_where_the_range_is_not_symmetric(loss: dict[str, float], expected: float) -> None:
    assert settings_of(train={"loss": loss}).train.loss.dual_clip == expected
    assert LossSettings(**loss).dual_clip == expected


def test_a_dual_clip_that_means_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"dual_clip = 0\.5 would clip ratios that have not risen: raise it above 1"):
        settings_of("train.loss.dual_clip=0.5")
    with pytest.raises(ConfigError, match="dual_clip = 3 has no effect with objective = 'cispo': set it to 0"):
        settings_of("train.loss.dual_clip=3", train={"method": "cispo"})


def test_a_stored_loss_of_before_dual_clip_is_read_without_it() -> None:
    now = settings_of(train={"loss": {"clip_high": 0.28}})
    tree = now.model_dump(mode="json")
    for name in ("dual_clip", "objective", "correction_level"):
        del tree["train"]["loss"][name]
    assert read_stored(tree, where="stored").train.loss.dual_clip == 0.0
    assert stored_identity(tree)["train.loss.dual_clip"] == 0.0 != now.identity()["train.loss.dual_clip"]


def test_a_cache_longer_than_what_it_is_part_of_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reward\.overlong\.cache = 200 is above the 128 tokens"):
        settings_of(reward={"overlong": {"cache": 200}})
    assert settings_of(reward={"overlong": {"cache": 200, "length": 300}}).reward.overlong.factor == 1.0
