from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from rollfeed.app.training import TrainedStep
from rollfeed.cli.training_view import Figures, TrainingView, charts_that_fit, duration_text, figure_lines
from rollfeed.evaluation import EvalResult, Interval, SetResult
from rollfeed.report import Curves, curves_of
from rollfeed.types import Drop, Group, Keep, LedgerCounts, Prompt, RunState, StepCommit, TrainBatch

FOUND = {
    **{"num_prompts": 50, "num_failed": 0, "reward_mean": 0.5, "response_length_mean": 9.0, "truncated_ratio": 0.0},
    **{"accuracy_low": 0.4, "accuracy_high": 0.7},
}
LINES = [
    "warm-up, 40 updates: accuracy 0.250, goal 0.500",
    "after 0 batches, sums: accuracy 0.500",
    "step 0: waits for the engine",
    "step 0: reward 0.500, no update: all groups had equal rewards, 33 tokens a response, 2.0 s rollouts, "
    "1.0 s training",
    "after 1 batches, sums: no accuracy",
]


def group_of(group_index: int) -> Group:
    prompt = Prompt(prompt_id="1", source="sums", text="1+1", token_ids=np.arange(3, dtype=np.int32))
    return Group(group_index=group_index, prompt=prompt, rollouts=())


def result(accuracy: float | None) -> EvalResult:
    found = SetResult(
        name="sums",
        num_prompts=50,
        n_samples_per_prompt=1,
        num_failed=0,
        first_failure=None,
        num_over_length=0,
        reward_mean=accuracy,
        accuracy=accuracy,
        accuracy_interval=Interval(0.4, 0.7),
        pass_at_k={},
        pass_hat_k={},
        pass_at_k_interval={},
        pass_hat_k_interval={},
        truncated_ratio=None,
        format_ok_ratio=None,
        response_length_mean=None,
        response_length_median=None,
        response_length_max=None,
        groups=(),
        right_P=(),
        reward_key=None,
        correct_threshold=1.0,
    )
    return EvalResult(sets=(found,), seed=0, policy_versions=(0, 0), seconds=1.0, num_tokens=1)


class Training:
    """A view of a run of four batches, and what happens in it."""

    def __init__(self, *, is_terminal: bool, is_live: bool = True, quiet: bool = False, width: int = 80) -> None:
        self.out = io.StringIO()
        self.width = width
        console = Console(
            file=self.out,
            force_terminal=is_terminal,
            width=width,
            height=40,
            color_system=None,
            soft_wrap=True,
            highlight=False,
            markup=False,
            quiet=quiet,
        )
        self.evaluations = [{"step": 0, "sets": {"sums": {**FOUND, "accuracy": 0.5}}}]
        self.now = 0.0
        self.view = TrainingView(
            console,
            name="runs/[a]",
            num_batches=4,
            rollout_batch_size=8,
            read_curves=lambda: curves_of(evaluations=self.evaluations),
            is_live=is_live,
            clock=lambda: self.now,
        )

    def begin(self) -> None:
        self.view.warming_up(40, 0.25, 0.5)
        self.view.on_evaluation(0, result(0.5))
        self.view.step_started(0)
        self.view.group_decided(group_of(0), Keep())
        self.view.group_decided(group_of(1), Drop("zero_std_0.0"))

    def end_a_batch(self) -> None:
        self.view.waiting("waits for the engine")
        self.now += 30.0
        self.view.on_step(
            TrainedStep(
                step=0,
                rollout_metrics={
                    "rollout/reward_mean": 0.5,
                    "rollout/response_length_mean": 33.0,
                    "perf/step_seconds": 2.0,
                    "perf/tokens_per_second": 1234.0,
                },
                train_metrics={},
                train_seconds=1.0,
                no_update="all groups had equal rewards",
            )
        )
        self.view.on_evaluation(1, result(None))

    def panel(self) -> list[str]:
        """What the panel shows now."""
        console = Console(file=io.StringIO(), force_terminal=True, width=self.width, color_system=None)
        console.print(self.view.panel())
        return inside(console.file.getvalue())


def inside(text: str) -> list[str]:
    """The lines of the last panel in a text, without its frame."""
    frame = text.rpartition("╭")[2]
    return [line.strip("│ ") for line in frame.split("\n") if line.startswith("│")]


def test_without_a_terminal_there_are_lines_and_a_chart_at_the_end() -> None:
    training = Training(is_terminal=False)
    with training.view:
        training.begin()
        training.end_a_batch()
    assert training.out.getvalue().splitlines() == LINES
    training.view.print_result()
    shown = training.out.getvalue().splitlines()[len(LINES) :]
    assert shown[:2] == ["held-out accuracy by batches trained on", "  sums: 0.500 (0.400 to 0.700)"]
    assert "•" in "".join(shown)


def test_quiet_prints_nothing() -> None:
    training = Training(is_terminal=True, quiet=True)
    with training.view:
        training.begin()
        training.end_a_batch()
    training.view.print_result()
    assert training.out.getvalue() == ""


def test_a_terminal_has_the_lines_above_figures_that_are_current() -> None:
    training = Training(is_terminal=True)
    with training.view:
        training.begin()
        making = training.panel()
        training.end_a_batch()
        trained = training.panel()
    assert making[0] == "held-out accuracy"
    assert making[-3:] == ["step 0 of 4", "held-out accuracy 0.500 (0.400 to 0.700)", "batch 0: 1 of 8 groups"]
    assert trained[-3] == "step 1 of 4, reward 0.500, 1,234 tokens/s, 2 min left"
    assert all(line in training.out.getvalue() for line in LINES)
    assert "runs/[a]" in training.out.getvalue()


def test_the_last_frame_stays_and_promises_nothing() -> None:
    training = Training(is_terminal=True)
    with training.view:
        training.begin()
        training.end_a_batch()
    frame = inside(training.out.getvalue())
    assert frame[-3:] == [
        "step 1 of 4, reward 0.500, 1,234 tokens/s",
        "held-out accuracy 0.500 (0.400 to 0.700)",
        "",
    ]
    training.view.print_result()
    assert inside(training.out.getvalue()) == frame


def test_the_last_frame_has_the_paired_change_and_below_it_that_of_each_of_several_sets() -> None:
    training = Training(is_terminal=True)
    change = {"since": 0, "num_prompts": 50, "accuracy": 0.25, "low": 0.125, "high": 0.375}
    later = {"step": 4, "sets": {"sums": {**FOUND, "accuracy": 0.75}}, "change": {"sums": change}}
    training.evaluations.append(later)
    with training.view:
        training.begin()
    frame = inside(training.out.getvalue())
    assert "held-out accuracy 0.500 -> 0.750 (0.400 to 0.700)" in frame
    assert "change +0.250 (+0.125 to +0.375)" in frame
    later["sets"]["words"] = {**FOUND, "accuracy": 0.25}
    training.view.print_result()
    assert training.out.getvalue().splitlines()[-3:] == [
        "  sums: 0.500 -> 0.750 (0.400 to 0.700), change +0.250 (+0.125 to +0.375)",
        "  words: 0.250 (0.400 to 0.700)",
        "  mean of 2 sets: 0.500 -> 0.500",
    ]


def test_the_warm_up_is_shown_until_the_first_batch() -> None:
    training = Training(is_terminal=True)
    with training.view:
        training.view.warming_up(40, 0.25, 0.5)
        assert training.panel() == ["step 0 of 4", "warm-up, 40 updates: accuracy 0.250, goal 0.500"]


@pytest.mark.parametrize("width", [20, 40, 96, 100, 300])
def test_the_panel_is_as_wide_as_the_terminal(width: int) -> None:
    training = Training(is_terminal=True, width=width)
    with training.view:
        training.begin()
    panel = training.out.getvalue().rpartition("╭")[2].split("\n")
    assert {len(line) for line in panel if line.startswith("│")} == {width}


def test_json_on_a_terminal_is_plain() -> None:
    training = Training(is_terminal=True, is_live=False)
    with training.view:
        training.begin()
    assert "╭" not in training.out.getvalue()


def test_a_finished_batch_is_being_trained_on() -> None:
    training = Training(is_terminal=True)
    batch = TrainBatch(
        step=0, policy_version=0, groups=(group_of(0),), advantages_S=np.zeros(0, np.float32), metrics={}
    )
    state = RunState(next_step=1, next_group_index=1, source={}, ledger=LedgerCounts())
    with training.view:
        training.begin()
        training.view.step_finished(StepCommit(batch=batch, dropped=(), wasted_tokens={}, state=state))
        assert training.panel()[-1] == "training on batch 0"


@pytest.fixture
def curves() -> Curves:
    found = {
        **{"num_prompts": 50, "num_failed": 0, "reward_mean": 0.5, "response_length_mean": 9.0},
        **{"truncated_ratio": 0.0, "accuracy_low": 0.4, "accuracy_high": 0.7},
    }
    return curves_of(
        evaluations=[{"step": step, "sets": {"sums": {**found, "accuracy": 0.5 + 0.1 * step}}} for step in range(2)],
        metrics=[{"step": step, "rollout/reward_mean": 0.5} for step in range(2)],
    )


def test_the_figures_are_those_that_are_known(curves: Curves) -> None:
    figures = Figures(num_batches=20)
    assert figure_lines(figures, None) == ["step 0 of 20", ""]
    figures.step, figures.reward, figures.tokens_per_second, figures.seconds_left = 7, 0.5, 1234.4, 780.0
    figures.doing = "training"
    assert figure_lines(figures, curves) == [
        "step 7 of 20, reward 0.500, 1,234 tokens/s, 13 min left",
        "held-out accuracy 0.500 -> 0.600 (0.400 to 0.700)",
        "training",
    ]


@pytest.mark.parametrize(
    ("width", "height", "titles"),
    [
        (120, 30, [["held-out accuracy", "reward of training"]]),
        (80, 30, [["held-out accuracy"], ["reward of training"]]),
        (80, 13, [["held-out accuracy"]]),
        (120, 6, []),
        (80, 0, []),
    ],
)
def test_charts_stand_where_there_is_room(curves: Curves, width: int, height: int, titles: list[list[str]]) -> None:
    rows = charts_that_fit(curves, width=width, height=height, num_batches=4, ascii_only=False)
    assert [[chart.title for chart in row] for row in rows] == titles
    assert sum(1 + max(len(chart.lines) for chart in row) for row in rows) <= height
    assert all(sum(len(max(chart.lines, key=len)) for chart in row) + 3 * (len(row) - 1) <= width for row in rows)


def test_a_run_without_sets_has_the_reward_alone(curves: Curves) -> None:
    alone = curves_of(evaluations=[], metrics=[{"step": 0, "rollout/reward_mean": 0.5}])
    rows = charts_that_fit(alone, width=120, height=30, num_batches=4, ascii_only=False)
    assert [[chart.title for chart in row] for row in rows] == [["reward of training"]]
    assert charts_that_fit(None, width=120, height=30, num_batches=4, ascii_only=False) == []


def test_durations_are_as_people_say_them() -> None:
    assert [duration_text(seconds) for seconds in (0.4, 59, 61, 3540, 3599, 7380)] == [
        *("0 s", "59 s", "1 min", "59 min", "1 h 00 min", "2 h 03 min"),
    ]
