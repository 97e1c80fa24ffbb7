"""What an evaluation shows while it goes on."""

from __future__ import annotations

import sys
import time

from rollfeed.evaluation import EvalProgress

_LINE_SECONDS = 5.0
_LIVE_SECONDS = 0.2


class EvalReporter:
    """A line on standard error that is kept current on a terminal, and repeated every few seconds elsewhere.

    A context manager: leaving it leaves the line.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._is_terminal = sys.stderr.isatty()
        self._last = time.monotonic()
        self._is_open = False

    def __call__(self, progress: EvalProgress) -> None:
        is_last = progress.num_answered == progress.num_answers
        interval = _LIVE_SECONDS if self._is_terminal else _LINE_SECONDS
        if self._quiet or (time.monotonic() - self._last < interval and not (is_last and self._is_terminal)):
            return
        self._last = time.monotonic()
        line = line_of(progress)
        print(f"\r{line:78}" if self._is_terminal else line, end="" if self._is_terminal else "\n", file=sys.stderr)
        sys.stderr.flush()
        self._is_open = self._is_terminal

    def __enter__(self) -> EvalReporter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._is_open:
            print(file=sys.stderr)


def line_of(progress: EvalProgress) -> str:
    """Return how far an evaluation is, on one line."""
    speed = progress.num_answered / max(progress.seconds, 1e-9)
    right = f"{progress.num_right / progress.num_scored:.1%} right so far" if progress.num_scored else "none scored yet"
    failed = f", {progress.num_failed} prompts failed" if progress.num_failed else ""
    return f"{progress.num_answered} of {progress.num_answers} answers, {right}{failed}, {speed:.1f} answers/s"


def share_with_interval(share: float | None, low: float, high: float) -> str:
    """Return an accuracy and its interval as people read them."""
    return "-" if share is None else f"{share:.1%} ({low:.1%} to {high:.1%})"
