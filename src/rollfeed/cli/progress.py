"""Progress for people: live lines on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

from rich.console import Console
from rich.live import Live
from rich.text import Text

from rollfeed.config import RolloutSettings
from rollfeed.store import question_of
from rollfeed.types import Drop, FilterDecision, Group, Rollout, StepCommit
from rollfeed.types.text import counted

T = TypeVar("T")

_PLAIN_LINE_SECONDS = 10.0
_STATUS_LINE_SECONDS = 5.0
_LIVE_SECONDS = 0.2
_SHOWN_CHARACTERS = 160


class StatusLine(Generic[T]):
    """A line on standard error that is kept current on a terminal, and repeated every few seconds elsewhere.

    A context manager: leaving it leaves the line.
    """

    def __init__(self, line_of: Callable[[T], str], *, quiet: bool) -> None:
        self._line_of = line_of
        self._quiet = quiet
        self._is_terminal = sys.stderr.isatty()
        self._last = time.monotonic()
        self._state: T | None = None

    def __call__(self, state: T) -> None:
        self._state = state
        if not self._quiet and time.monotonic() - self._last >= (
            _LIVE_SECONDS if self._is_terminal else _STATUS_LINE_SECONDS
        ):
            self._last = time.monotonic()
            self._print(state)

    def __enter__(self) -> StatusLine[T]:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._is_terminal and not self._quiet and self._state is not None:
            self._print(self._state)
            print(file=sys.stderr)

    def _print(self, state: T) -> None:
        line = self._line_of(state)
        print(f"\r{line:78}" if self._is_terminal else line, end="" if self._is_terminal else "\n", file=sys.stderr)
        sys.stderr.flush()


class ProgressReporter:
    """Fits :class:`rollfeed.protocols.RolloutObserver`; a context manager."""

    def __init__(self, console: Console, settings: RolloutSettings, *, reward_key: str | None) -> None:
        self._console = console
        self._settings = settings
        self._reward_key = reward_key
        self._last_plain_line = time.monotonic()
        self._reset(0)
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._line, transient=True)

    def __enter__(self) -> ProgressReporter:
        if self._console.is_terminal and not self._console.quiet:
            self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._live.stop()

    def step_started(self, step: int) -> None:
        self._reset(step)

    def group_submitted(self, group: Group) -> None:
        self._in_flight.add(group.group_index)

    def rollout_finished(self, rollout: Rollout) -> None:
        self._num_rollouts += 1
        self._num_tokens += rollout.response_tokens
        if not self._live.is_started and time.monotonic() - self._last_plain_line > _PLAIN_LINE_SECONDS:
            self._last_plain_line = time.monotonic()
            self._console.print(self._line().plain.replace("\n ", ";"))

    def group_decided(self, group: Group, decision: FilterDecision) -> None:
        self._in_flight.discard(group.group_index)
        self._rewards += group.reward_values(self._reward_key).tolist()
        if isinstance(decision, Drop):
            self._drops[decision.reason] += 1
        else:
            self._num_kept += 1

    def waiting(self, message: str) -> None:
        self._console.print(f"step {self._step}: {message}", style="yellow")

    def step_finished(self, commit: StepCommit) -> None:
        batch, metrics = commit.batch, commit.batch.metrics
        wasted = sum(commit.wasted_tokens.values())
        console = self._console
        console.print(
            f"step {batch.step}: {counted(len(batch.groups), 'group')} kept, {len(commit.dropped)} dropped; "
            f"reward {metrics['rollout/reward_mean']:.3f}, "
            f"{metrics['rollout/response_length_mean']:.0f} tokens a response, "
            f"{metrics['perf/tokens_per_second']:.0f} tokens/s, {wasted} tokens wasted, "
            f"{metrics['perf/step_seconds']:.1f} s"
        )
        first, last = batch.groups[0], batch.groups[-1]
        self._print_rollout("first", first, first.rollouts[0])
        self._print_rollout("last", last, last.rollouts[-1])
        for dropped in commit.dropped:
            group = dropped.group
            console.print(
                f"  dropped group {group.group_index} ({dropped.reason}, {group.prompt.source}): "
                f"rewards {self._rewards_of(group)}; {_shown(_question(group))}"
            )

    def _reset(self, step: int) -> None:
        self._step = step
        self._started = time.monotonic()
        self._in_flight: set[int] = set()
        self._num_kept = 0
        self._num_rollouts = 0
        self._num_tokens = 0
        self._drops: Counter[str] = Counter()
        self._rewards: list[float] = []

    def _line(self) -> Text:
        seconds = max(time.monotonic() - self._started, 1e-9)
        reward = f"{sum(self._rewards) / len(self._rewards):.3f}" if self._rewards else "-"
        drops = ", ".join(f"{count} {reason}" for reason, count in self._drops.most_common(3))
        in_flight = counted(len(self._in_flight), "group")
        return Text(
            f"step {self._step + 1}/{self._settings.num_rollout}: "
            f"kept {self._num_kept}/{self._settings.rollout_batch_size}, "
            f"dropped {self._drops.total()}{f' ({drops})' if drops else ''}, in flight {in_flight}\n"
            f"  {self._num_rollouts} rollouts, {self._num_tokens / seconds:.0f} tokens/s, mean reward {reward}"
        )

    def _print_rollout(self, name: str, group: Group, rollout: Rollout) -> None:
        sample = rollout.samples[-1]
        self._console.print(f"  {name} sample (group {group.group_index}, {group.prompt.source})")
        reward = rollout.get_reward_value(self._reward_key)
        for title, text in (
            ("prompt", _shown(_question(group))),
            ("response", _shown(sample.response)),
            ("label", _shown(str(sample.label))),
            ("reward", f"{reward:.3f}"),
        ):
            self._console.print(f"    {title:9}{text}")

    def _rewards_of(self, group: Group) -> str:
        return " ".join(
            f"{rollout.get_reward_value(self._reward_key):.2f}"
            if rollout.samples and all(sample.reward is not None for sample in rollout.samples)
            else "failed"
            for rollout in group.rollouts
        )


def _question(group: Group) -> str:
    return question_of(group.prompt.text, group.prompt.messages or ())


def _shown(text: str) -> str:
    """Return the text on one line, cut in the middle when it is long."""
    line = text.replace("\n", "⏎ ")
    if len(line) > _SHOWN_CHARACTERS:
        half = _SHOWN_CHARACTERS // 2 - 2
        line = f"{line[:half]} … {line[-half:]}"
    return line
