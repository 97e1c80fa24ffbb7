from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rollfeed.config.optimizer import LearningRateSchedule
from rollfeed.errors import CheckpointError
from rollfeed.training.optimizer import learning_rate
from rollfeed.training.trainer import Trainer


def rates(schedule: str, *, warmup: int = 2, final: float = 0.1) -> list[float]:
    return [
        learning_rate(
            update,
            peak=2.0,
            schedule=LearningRateSchedule(schedule),
            num_updates=7,
            warmup_updates=warmup,
            final_ratio=final,
        )
        for update in range(9)
    ]


def test_warm_up_rises_in_a_line_and_begins_above_zero() -> None:
    assert rates("constant", warmup=4)[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]


def test_constant_stays() -> None:
    assert rates("constant")[2:] == [2.0] * 7


def test_linear_falls_in_a_line_to_its_end_and_stays_there() -> None:
    assert rates("linear")[2:] == pytest.approx([2.0, 1.55, 1.1, 0.65, 0.2, 0.2, 0.2])


def test_cosine_falls_slowly_at_both_ends() -> None:
    values = rates("cosine", final=0.0)[2:]
    assert values == pytest.approx([2.0, 1 + 0.5**0.5, 1.0, 1 - 0.5**0.5, 0.0, 0.0, 0.0])


def trained(make_trainer: Callable[..., Trainer], batch_by_seed: Callable[..., Any], **optimizer: Any) -> Any:
    """Return the state after 4 of 4 batches under a linear schedule, and the rates that they had."""
    trainer = make_trainer(num_batches=4, optimizer={"learning_rate": 1.0e-3, "schedule": "linear", **optimizer})
    rates = [trainer.train_step(batch_by_seed(step)).metrics["train/learning_rate"] for step in range(4)]
    return trainer.state_dict(), rates


def test_a_finished_training_that_goes_on_keeps_its_last_rate(
    make_trainer: Callable[..., Trainer], batch_by_seed: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = {"learning_rate": 1.0e-3, "schedule": "linear", "final_learning_rate_ratio": 0.25}
    state, rates = trained(make_trainer, batch_by_seed, final_learning_rate_ratio=0.25)
    assert rates == pytest.approx([1.0e-3, 0.75e-3, 0.5e-3, 0.25e-3])
    longer = make_trainer(num_batches=8, optimizer=optimizer)
    longer.load_state_dict(state)
    assert longer.train_step(batch_by_seed(4)).metrics["train/learning_rate"] == pytest.approx(0.25e-3)
    assert "set train.optimizer.decay_batches" in caplog.text
    # The length goes on from state to state, and is another one on purpose only.
    longest = make_trainer(num_batches=9, optimizer=optimizer)
    longest.load_state_dict(longer.state_dict())
    assert longest.train_step(batch_by_seed(5)).metrics["train/learning_rate"] == pytest.approx(0.25e-3)
    other = make_trainer(num_batches=8, optimizer={**optimizer, "decay_batches": 7})
    other.load_state_dict(state)
    assert other.train_step(batch_by_seed(4)).metrics["train/learning_rate"] == pytest.approx(0.5e-3)


def test_a_training_that_would_go_on_with_a_rate_of_0_is_refused(
    make_trainer: Callable[..., Trainer], batch_by_seed: Callable[..., Any]
) -> None:
    optimizer = {"learning_rate": 1.0e-3, "schedule": "linear"}
    state, _ = trained(make_trainer, batch_by_seed)
    longer = make_trainer(num_batches=8, optimizer=optimizer)
    with pytest.raises(CheckpointError, match=r"set train\.optimizer\.decay_batches"):
        longer.load_state_dict(state)
    assert longer.step == 0
    again = make_trainer(num_batches=4, optimizer=optimizer)
    again.load_state_dict(state)
    assert again.step == 4


def test_a_run_of_one_update_takes_the_peak() -> None:
    for schedule in LearningRateSchedule:
        rate = learning_rate(0, peak=1.0, schedule=schedule, num_updates=1, warmup_updates=0, final_ratio=0.0)
        assert rate == 1.0
