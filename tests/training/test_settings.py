from __future__ import annotations

import pytest
from pydantic import ValidationError

from rollfeed.config.train import LossSettings, TrainSettings


def test_the_engines_mismatch_is_not_counted_twice() -> None:
    with pytest.raises(ValidationError, match="would count the difference to the engine twice"):
        LossSettings(correction="truncate", old_logprobs="rollout")


def test_updates_are_epochs_times_minibatches_times_batches() -> None:
    settings = TrainSettings(num_epochs=2, num_minibatches=3)
    assert (settings.updates_per_batch, settings.num_updates(5)) == (6, 30)


@pytest.mark.parametrize(
    "wrong",
    [
        {"optimizer": {"learning_rate": 0.0}},
        {"loss": {"clip_high": float("inf")}},
        {"loss": {"kl_estimator": "k4"}},
        {"micro_batch_tokens": 1},
        {"learning_rate": 1e-3},
    ],
)
def test_values_outside_their_range_and_unknown_keys_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        TrainSettings(**wrong)
