"""What training shows while it goes on: curves that are kept current on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rollfeed.app.training import TrainedStep
from rollfeed.cli.training.figures import Chart, Figures, charts_that_fit, figure_lines
from rollfeed.evaluation import EvalResult
from rollfeed.report import Curves, accuracy_lines, accuracy_report
from rollfeed.types import FilterDecision, Keep, Rollout, StepCommit
from rollfeed.types import Group as RolloutGroup

_FRAME_WIDTH, _FRAME_HEIGHT = 4, 2
_LOG_HEIGHT = 4  # lines of the log that stay in sight above the panel
_STYLES = {"held-out accuracy": "cyan", "reward of training": "green"}


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take what is shown and where.

        Args:
            console: Lines go there, and the curves below them where it is a terminal.
            name: Of the run.
            num_batches: That the run will have trained on.
            rollout_batch_size: Groups of a batch.
            read_curves: Gives the curves as they are now.
            is_live: Keep curves current where there is a terminal; else only lines are printed.
            clock: Gives seconds.
        """
        self._console = console
        self._name = name
        self._rollout_batch_size = rollout_batch_size
        self._read_curves = read_curves
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
        self._console.print(
            f"step {step.step}: reward {rollout['rollout/reward_mean']:.3f}, {change}, "
            f"{rollout['rollout/response_length_mean']:.0f} tokens a response, "
            f"{rollout['perf/step_seconds']:.1f} s rollouts, {step.train_seconds:.1f} s training"
        )
        self._num_trained += 1
        figures = self._figures
        figures.step = step.step + 1
        figures.reward = rollout["rollout/reward_mean"]
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
    table = Table.grid(padding=(0, 3), pad_edge=False)
    for _ in charts:
        table.add_column(no_wrap=True)
    table.add_row(
        *(Text("\n".join([chart.title, *chart.lines]), style=_STYLES[chart.title], no_wrap=True) for chart in charts)
    )
    return table
