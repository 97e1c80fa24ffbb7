"""Training while it goes on: curves that are kept current on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rollfeed.app.training import TrainedStep
from rollfeed.cli.shown import duration_text
from rollfeed.evaluation import EvalResult
from rollfeed.report import Curves, accuracy_lines, accuracy_report, change_text, paired_text, text_chart
from rollfeed.types import FilterDecision, Keep, Rollout, StepCommit
from rollfeed.types import Group as RolloutGroup

_FRAME_WIDTH, _FRAME_HEIGHT = 4, 2
_LOG_HEIGHT = 4  # lines of the log that stay in sight above the panel
_STYLES = {"held-out accuracy": "cyan", "reward of training": "green", "loss of training": "green"}
_WIDE = 96  # columns from which two charts stand side by side
_GAP = 3  # columns between them
_LOWEST_CHART, _HIGHEST_CHART = 6, 11  # lines, without the title


@dataclass(slots=True, kw_only=True)
class Figures:
    """Progress of a training; the numbers are None until they are known."""

    num_batches: int
    """That the run will have trained on."""
    step: int = 0
    """Batches trained on."""
    reward: float | None = None
    """Mean of the last batch."""
    tokens_per_second: float | None = None
    """Of the last batch."""
    seconds_left: float | None = None
    doing: str = ""
    """What goes on now."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A title and a chart below it."""

    title: str
    lines: list[str]


class TrainingView:
    """Fits :class:`rollfeed.protocols.RolloutObserver`; a context manager."""

    def __init__(
        self,
        console: Console,
        *,
        name: str,
        num_batches: int,
        rollout_batch_size: int,
        read_curves: Callable[[], Curves],
        is_live: bool,
        has_rewards: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take what is shown and where.

        ``is_live`` keeps curves current where there is a terminal; else only lines are printed. Without ``has_rewards``
        nothing is said of rewards.
        """
        self._console = console
        self._name = name
        self._rollout_batch_size = rollout_batch_size
        self._read_curves = read_curves
        self._has_rewards = has_rewards
        self._clock = clock
        self._curves: Curves | None = None
        self._figures = Figures(num_batches=num_batches)
        self._began: float | None = None
        self._num_trained = 0
        self._making = 0
        self._num_kept = 0
        self._is_live = is_live and console.is_terminal and not console.quiet
        self._live = Live(console=console, refresh_per_second=2, get_renderable=self.panel)

    def __enter__(self) -> TrainingView:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        # The last frame stays on the terminal.
        self._figures.doing, self._figures.seconds_left = "", None
        self._live.stop()

    def on_step(self, step: TrainedStep) -> None:
        """Take the figures of a batch that was trained on."""
        rollout, train = step.rollout_metrics, step.train_metrics
        change = f"no update: {step.no_update}"
        if step.no_update is None:
            change = f"loss {train['train/loss']:.4f}, gradient {train['train/grad_norm']:.3f}"
        reward = rollout["rollout/reward_mean"] if self._has_rewards else None
        self._console.print(
            f"step {step.step}: {'' if reward is None else f'reward {reward:.3f}, '}{change}, "
            f"{rollout['rollout/response_length_mean']:.0f} tokens a response, "
            f"{rollout['perf/step_seconds']:.1f} s rollouts, {step.train_seconds:.1f} s training"
        )
        self._num_trained += 1
        figures = self._figures
        figures.step = step.step + 1
        figures.reward = reward
        figures.tokens_per_second = rollout["perf/tokens_per_second"]
        num_left = figures.num_batches - figures.step
        figures.seconds_left = None
        if self._began is not None and num_left > 0:
            figures.seconds_left = (self._clock() - self._began) / self._num_trained * num_left
        self._refresh()

    def on_evaluation(self, step: int, result: EvalResult) -> None:
        """Take what an evaluation found after so many batches."""
        for each in result.sets:
            accuracy = "no accuracy" if each.accuracy is None else f"accuracy {each.accuracy:.3f}"
            self._console.print(f"after {step} batches, {each.name}: {accuracy}")
        self._figures.step = step
        self._refresh()

    def warming_up(self, num_updates: int, accuracy: float, goal: float) -> None:
        """Take what the warm-up before the first batch has reached, and what it has to reach."""
        message = f"warm-up, {num_updates} updates: accuracy {accuracy:.3f}, goal {goal:.3f}"
        self._console.print(message)
        self._figures.doing = message

    def print_result(self) -> None:
        """Print the curve of the accuracy as lines; where one was kept current, only what it does not tell of sets."""
        curves = self._read_curves()
        lines = accuracy_report(curves, ascii_only=self._ascii_only)
        if self._is_live:
            lines = accuracy_lines(curves) if len(curves.evaluations) > 1 else []
        for line in lines:
            self._console.print(Text(line))

    def panel(self) -> RenderableType:
        """Return what is below the lines on a terminal now, in its size."""
        width, height = self._console.size
        figures = [Text(line, no_wrap=True, overflow="ellipsis") for line in figure_lines(self._figures, self._curves)]
        rows = charts_that_fit(
            self._curves,
            width=width - _FRAME_WIDTH,
            height=height - len(figures) - _FRAME_HEIGHT - _LOG_HEIGHT,
            num_batches=self._figures.num_batches,
            ascii_only=self._ascii_only,
        )
        return Panel(Group(*map(_beside, rows), *figures), title=Text(self._name), title_align="left")

    def step_started(self, step: int) -> None:
        self._began = self._clock() if self._began is None else self._began
        self._making, self._num_kept = step, 0
        self._tell_kept()

    def group_submitted(self, group: RolloutGroup) -> None:
        pass

    def rollout_finished(self, rollout: Rollout) -> None:
        pass

    def group_decided(self, group: RolloutGroup, decision: FilterDecision) -> None:
        self._num_kept += isinstance(decision, Keep)
        self._tell_kept()

    def waiting(self, message: str) -> None:
        self._console.print(f"step {self._making}: {message}", style="yellow")

    def step_finished(self, commit: StepCommit) -> None:
        self._figures.doing = f"training on batch {commit.batch.step}"

    def _tell_kept(self) -> None:
        self._figures.doing = f"batch {self._making}: {self._num_kept} of {self._rollout_batch_size} groups"

    def _refresh(self) -> None:
        self._figures.doing = ""
        if self._is_live:
            self._curves = self._read_curves()

    @property
    def _ascii_only(self) -> bool:
        return self._console.options.ascii_only


def _beside(charts: Sequence[Chart]) -> Table:
    table = Table.grid(padding=(0, _GAP), pad_edge=False)
    for _ in charts:
        table.add_column(no_wrap=True)
    table.add_row(
        *(Text("\n".join([chart.title, *chart.lines]), style=_STYLES[chart.title], no_wrap=True) for chart in charts)
    )
    return table


def figure_lines(figures: Figures, curves: Curves | None) -> list[str]:
    """Return the figures: how far training is and how fast, the held-out accuracy, and what goes on."""
    parts = [f"step {figures.step} of {figures.num_batches}"]
    if figures.reward is not None:
        parts.append(f"reward {figures.reward:.3f}")
    if figures.tokens_per_second is not None:
        parts.append(f"{figures.tokens_per_second:,.0f} tokens/s")
    if figures.seconds_left is not None:
        parts.append(f"{duration_text(figures.seconds_left)} left")
    return [", ".join(parts), *([] if curves is None else _held_out(curves)), figures.doing]


def _held_out(curves: Curves) -> list[str]:
    accuracy = curves.overall_accuracy()
    change = curves.change(next(iter(curves.evaluations))) if len(curves.evaluations) == 1 else None
    lines = [f"held-out accuracy {change_text(accuracy)}"] if accuracy else []
    return [*lines, paired_text(change).removeprefix(", ")] if change else lines


def charts_that_fit(
    curves: Curves | None, *, width: int, height: int, num_batches: int, ascii_only: bool
) -> list[list[Chart]]:
    """Return the charts of accuracy and reward by rows: beside each other, else below, else what there is room for.

    The room is ``width`` characters wide and ``height`` lines high.
    """
    if curves is None:
        return []
    name, points = curves.of_training
    found = [("held-out accuracy", curves.overall_accuracy(), True), (f"{name} of training", points, False)]
    shown = [each for each in found if each[1]]
    num_rows = 1 if width >= _WIDE else len(shown)
    while num_rows and height // num_rows - 1 < _LOWEST_CHART:
        num_rows -= 1
    if not num_rows:
        return []
    num_beside = 2 if width >= _WIDE and len(shown) > 1 else 1
    chart_width = (width - _GAP * (num_beside - 1)) // num_beside
    chart_height = min(_HIGHEST_CHART, height // num_rows - 1)
    charts = [
        Chart(
            title,
            text_chart(
                points,
                width=chart_width,
                height=chart_height,
                num_batches=num_batches,
                shares=shares,
                ascii_only=ascii_only,
            ),
        )
        for title, points, shares in shown[: num_rows * num_beside]
    ]
    return [charts[first : first + num_beside] for first in range(0, len(charts), num_beside)]
