"""``rollfeed replay``: what a run did with its answers, done again."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from rollfeed import app
from rollfeed.app import StepReplay
from rollfeed.cli import exit_codes
from rollfeed.cli.arguments import Parsers, add_command, add_flags, add_overrides, path_argument
from rollfeed.cli.progress import StatusLine
from rollfeed.types.text import counted

_EPILOG = """Rewards, filters, advantages, masks and the cut of every step are made again of the answers that RUN has;
nothing is answered again, no model is loaded and nothing is written. Without --set the batches are the same, byte for
byte, and the exit code is 1 where they are not. Rewards that may be others each time are refused: those of servers, of
async functions, and where reward.pure = false.

examples:
  rollfeed replay runs/demo
  rollfeed replay runs/words --set reward.rm_type=f1 --set plugins.reward=
  rollfeed replay runs/words --set "filters.dynamic_sampling=[{name='reward_std'}]" --set advantage.divide_by_std=true
"""
_SHOWN_FAILURES = 3


def register(commands: Parsers) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "replay",
        run,
        description="Score, filter and cut the stored answers of a run again, and tell what comes out otherwise.",
        epilog=_EPILOG,
    )
    parser.add_argument("directory", metavar="RUN", type=path_argument, help="the directory that `rollfeed run` wrote")
    add_overrides(parser)
    parser.add_argument("--step", type=int, metavar="N", help="only this step")
    add_flags(parser, quiet=True, json="what came of it as one JSON object, with `identical`")


def run(arguments: argparse.Namespace) -> int:
    """Replay, and print a table of what is otherwise.

    Raises:
        ConfigError: If there is no such run, a setting is wrong or changes nothing here, or rewards are not pure.
        RollfeedError: If a function of the user's fails.
    """
    steps: list[StepReplay] = []
    with StatusLine(_progress, quiet=arguments.quiet) as progress:

        async def replay_all() -> None:
            async for each in app.replay_run(arguments.directory, arguments.overrides, step=arguments.step):
                steps.append(replace(each, batch=None))  # which may be large
                progress(len(steps))

        asyncio.run(exit_codes.until_signal(replay_all()))
    identical = all(each.identical for each in steps)
    if arguments.json:
        about = {"directory": str(arguments.directory), "overrides": arguments.overrides, "identical": identical}
        print(json.dumps({**about, "totals": _totals(steps), "steps": [_record(each) for each in steps]}))
    else:
        if identical and arguments.overrides:
            print("--set changes nothing here: docs/runs.md says what has a grader of its own", file=sys.stderr)
        print("\n".join(_lines(steps, identical=identical)))
    return exit_codes.DONE if identical or arguments.overrides else exit_codes.FAILED


def _record(each: StepReplay) -> dict[str, Any]:
    return {field.name: getattr(each, field.name) for field in fields(each) if field.name != "batch"}


def _progress(num_done: int) -> str:
    return f"{counted(num_done, 'step')} replayed"


def _totals(steps: Sequence[StepReplay]) -> dict[str, int]:
    names = ("num_rollouts", "rewards_changed", "kept_before", "kept_now", "advantages_changed")
    return {name: sum(getattr(each, name) for each in steps) for name in names}


def _lines(steps: Sequence[StepReplay], *, identical: bool) -> Iterator[str]:
    if identical:
        yield f"{counted(len(steps), 'step')}: identical, byte for byte"
        return
    rows = [("step", "reward", "changed", "kept", "in/out", "advantages", "trained tokens"), *map(_row, steps)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    totals = _totals(steps)
    yield (
        f"{counted(len(steps), 'step')}: {totals['rewards_changed']} of {totals['num_rollouts']} rewards and "
        f"{totals['advantages_changed']} advantages changed; {totals['kept_now']} groups kept, "
        f"{totals['kept_before']} before"
    )
    yield from _reasons("dropped before", (each.dropped_before for each in steps))
    yield from _reasons("dropped now", (each.dropped_now for each in steps))
    if surplus := sum(each.num_surplus for each in steps):
        yield f"  {counted(surplus, 'group')} kept beyond what a batch takes"
    failures = [failure for each in steps for failure in each.failures]
    if failures:
        yield f"  {counted(len(failures), 'group')} cannot be scored:"
        yield from (f"    {failure}" for failure in failures[:_SHOWN_FAILURES])


def _row(each: StepReplay) -> tuple[str, ...]:
    now = "-" if each.reward_now is None else f"{each.reward_now:.3f}"
    return (
        str(each.step),
        f"{each.reward_before:.3f} -> {now}",
        f"{each.rewards_changed}/{each.num_rollouts}",
        _change(each.kept_before, each.kept_now),
        f"+{len(each.entered)} -{len(each.left)}",
        str(each.advantages_changed),
        _change(each.trained_tokens_before, each.trained_tokens_now),
    )


def _change(before: int, now: int) -> str:
    return str(now) if before == now else f"{before} -> {now}"


def _reasons(told: str, counts: Iterable[Mapping[str, int]]) -> Iterator[str]:
    total = sum((Counter(each) for each in counts), Counter[str]())
    if total:
        yield f"  {told}: {', '.join(f'{count} {reason}' for reason, count in total.most_common())}"
