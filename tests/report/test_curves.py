from __future__ import annotations

import math

from rollfeed.report import Point, curves_of


def test_curves_are_made_from_the_records_of_the_three_logs(evaluation) -> None:
    curves = curves_of(
        evaluations=[evaluation(0, {"sums": 20}), evaluation(1, {"sums": 50})],
        trained=[{"step": 0, "train/entropy": 1.5, "train/mismatch_kl": 0.25}],
        metrics=[{"step": 0, "rollout/reward_mean": 0.5, "rollout/response_length_mean": 8.0}],
    )
    assert [(point.step, point.value) for point in curves.accuracy("sums")] == [(0, 0.2), (1, 0.5)]
    assert all(point.low < point.value < point.high for point in curves.accuracy("sums"))
    assert curves.reward == (Point(0, 0.5, 0.5, 0.5),)
    assert curves.response_length == (Point(0, 8.0, 8.0, 8.0),)
    assert curves.entropy == (Point(0, 1.5, 1.5, 1.5),)
    assert curves.mismatch == (Point(0, 0.25, 0.25, 0.25),)
    assert curves.num_batches == 1


def test_where_answers_were_given_the_curve_of_training_is_the_loss() -> None:
    metrics = [{"step": step, "rollout/reward_mean": 0.0} for step in range(2)]
    curves = curves_of(
        evaluations=[], metrics=metrics, trained=[{"step": step, "train/loss": 2.0 - step} for step in range(2)]
    )
    assert curves.of_training == ("loss", (Point(0, 2.0, 2.0, 2.0), Point(1, 1.0, 1.0, 1.0)))
    sampled = [{"step": 0, "train/loss": 0.1, "train/mismatch_kl": 0.0}, {"step": 1, "no_update": "equal"}]
    curves = curves_of(evaluations=[], metrics=metrics, trained=sampled)
    assert curves.of_training == ("reward", (Point(0, 0.0, 0.0, 0.0), Point(1, 0.0, 0.0, 0.0)))


def test_without_records_there_is_no_curve() -> None:
    curves = curves_of(evaluations=[])
    assert curves.num_batches == 0
    assert curves.overall_accuracy() == ()


def test_what_is_missing_or_not_finite_is_left_out() -> None:
    values = [0.5, None, math.nan, math.inf, 1e300, 0.25]
    curves = curves_of(
        evaluations=[],
        metrics=[{"step": step, "rollout/reward_mean": value} for step, value in enumerate(values)],
        trained=[{"step": 0}],
    )
    assert [(point.step, point.value) for point in curves.reward] == [(0, 0.5), (5, 0.25)]
    assert curves.entropy == ()


def test_an_evaluation_without_accuracy_is_kept_and_has_no_point(evaluation) -> None:
    curves = curves_of(evaluations=[evaluation(0, {"sums": None}), evaluation(2, {"sums": 40})])
    assert [each.accuracy for each in curves.evaluations["sums"]] == [None, 0.4]
    assert [point.step for point in curves.accuracy("sums")] == [2]


def test_a_step_that_was_made_again_counts_once(evaluation) -> None:
    records = [evaluation(0, {"sums": 20}), evaluation(2, {"sums": 30}), evaluation(2, {"sums": 40})]
    metrics = [{"step": 0, "rollout/reward_mean": 0.1}, {"step": 0, "rollout/reward_mean": 0.2}]
    curves = curves_of(evaluations=records, metrics=metrics)
    assert [(point.step, point.value) for point in curves.accuracy("sums")] == [(0, 0.2), (2, 0.4)]
    assert [point.value for point in curves.reward] == [0.2]


def test_the_overall_accuracy_of_one_set_has_its_interval(learning) -> None:
    assert learning.overall_accuracy() == learning.accuracy("sums")


def test_the_overall_accuracy_of_several_sets_is_their_mean(evaluation) -> None:
    curves = curves_of(evaluations=[evaluation(0, {"a": 20, "b": 40}), evaluation(1, {"a": None, "b": 50})])
    assert [(point.step, round(point.value, 12)) for point in curves.overall_accuracy()] == [(0, 0.3), (1, 0.5)]
    assert all(point.low == point.high for point in curves.overall_accuracy())
