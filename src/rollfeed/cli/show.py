"""``rollfeed show``: the contents of a run directory, for people and for scripts."""

from __future__ import annotations

import argparse
import json
import math
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollfeed.app.training import run_curves
from rollfeed.cli.arguments import Parsers, add_command, add_flags, path_argument
from rollfeed.config.settings import flatten
from rollfeed.report import accuracy_report
from rollfeed.store import FoundGroup, GroupSummary, MemberSummary, RunReader, RunRecord, StepRecord, question_of
from rollfeed.types import Correct, Rollout, Sample, SampleStatus
from rollfeed.types.text import counted, step_range

_EXAMPLE = """\
examples:
  rollfeed show runs/demo                    the run, its steps and their groups
  rollfeed show runs/demo --step 2           one step
  rollfeed show runs/demo --group 5          one group whole, with the text of its responses
  rollfeed show runs/demo --json             one JSON object, for scripts
"""
_SUMMARY = ("group_index", "prompt_id", "source", "question", "prompt", "drop_reason")
_VERDICT = ("correct", "format_ok", "extracted", "outcome", "detail")
_PIPE_WIDTH = 170  # of a file or pipe, which has no width of its own
_QUESTION_CHARACTERS = 100
_STEPS_WITH_GROUPS = 3  # without --step, the groups of so many last steps are listed

_SETTINGS: tuple[tuple[str, str], ...] = (
    ("model.checkpoint", "model"),
    ("rollout.rollout_batch_size", "groups a step"),
    ("rollout.n_samples_per_prompt", "samples a prompt"),
    ("sampling.rollout_temperature", "temperature"),
    ("sampling.rollout_max_response_len", "response tokens at most"),
    ("rollout.deterministic", "deterministic"),
    ("seed", "seed"),
)

_STEP_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("reward", "rollout/reward_mean", ".3f"),
    ("correct", "rollout/correct_ratio", ".0%"),
    ("length", "rollout/response_length_mean", ".1f"),
    ("cut off", "rollout/truncated_ratio", ".0%"),
    ("tok/s", "perf/tokens_per_second", ".0f"),
)


def register(commands: Parsers) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "show",
        run,
        description="Print the steps of a run, their groups, rewards, lengths, drop reasons and waste. "
        "Works while the run goes on, and after it was killed.",
        epilog=_EXAMPLE,
    )
    parser.add_argument("directory", type=path_argument, metavar="DIR", help="the directory that `rollfeed run` wrote")
    parser.add_argument("--step", type=int, metavar="N", help="only this step")
    parser.add_argument("--group", type=int, metavar="G", help="one group whole, by its index")
    add_flags(parser, json="one JSON object and nothing else")


def run(arguments: argparse.Namespace) -> int:
    """Print what was asked for and return 0.

    Raises:
        RunDirectoryError: If there is no run, step or group there, or it cannot be read.
    """
    with RunReader(arguments.directory) as reader:
        if arguments.group is not None:
            found = reader.group(arguments.group, step=arguments.step)
            if arguments.json:
                _print_json(group_view(found))
            else:
                print_group(found)
        elif arguments.json:
            _print_json(run_view(reader, step=arguments.step))
        else:
            print_run(reader, step=arguments.step)
    return 0


def run_view(reader: RunReader, *, step: int | None) -> dict[str, Any]:
    """Return a run as JSON values: all steps, or one."""
    record, isolation = reader.run(), reader.isolation()
    steps = reader.steps() if step is None else (reader.step(step),)
    return {
        "run": {
            "directory": str(reader.path),
            "status": reader.status(),
            "cause": record.cause,
            "settings": record.settings,
            "changes": [asdict(change) for change in reader.changes()],
            "isolation": None if isolation is None else asdict(isolation),
        },
        "steps": [_step_view(record, reader.summaries(record.step)) for record in steps],
        "eval": eval_view(reader.evaluations()),
        "totals": asdict(reader.totals()),
        "ledger": asdict(reader.ledger()),
    }


def eval_view(evaluations: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the first and the last evaluation, without the answers to each prompt, and the curve between them.

    None where there is no evaluation. The last one has the change since the first, with its paired interval.
    """
    if not evaluations:
        return None
    first, final = (
        {name: value for name, value in each.items() if name != "prompts"} for each in (evaluations[0], evaluations[-1])
    )
    curve = [{"step": each["step"], "accuracy": each["accuracy"]} for each in evaluations]
    return {"first": first, "final": final, "curve": curve}


def group_view(found: FoundGroup) -> dict[str, Any]:
    """Return one group whole as JSON values: prompt, texts, rewards and token counts."""
    group, prompt = found.group, found.group.prompt
    return {
        "step": found.step,
        "group_index": group.group_index,
        "kept": found.drop_reason is None,
        "drop_reason": found.drop_reason,
        "prompt_id": prompt.prompt_id,
        "source": prompt.source,
        "question": question_of(prompt.text, prompt.messages or ()),
        "prompt": prompt.text,
        "prompt_tokens": len(prompt.token_ids),
        "messages": prompt.messages,
        "label": prompt.label,
        "metadata": prompt.metadata,
        "samples": [
            _sample_view(rollout, sample) for rollout in group.rollouts for sample in rollout.samples or (None,)
        ],
    }


def _step_view(record: StepRecord, groups: tuple[GroupSummary, ...]) -> dict[str, Any]:
    return {
        **{name: value for name, value in asdict(record).items() if name != "metrics"},
        "metrics": {name: value if math.isfinite(value) else None for name, value in record.metrics.items()},
        "groups": [_summary_view(group) for group in groups if group.drop_reason is None],
        "dropped": [_summary_view(group) for group in groups if group.drop_reason is not None],
    }


def _summary_view(group: GroupSummary) -> dict[str, Any]:
    members = group.members
    return {
        **{name: getattr(group, name) for name in _SUMMARY},
        "rewards": [member.reward for member in members],
        "correct": [member.correct for member in members],
        "statuses": [member.status for member in members],
        "response_lengths": [member.response_length for member in members],
        "errors": [member.error for member in members if member.error is not None],
    }


def _sample_view(rollout: Rollout, sample: Sample | None) -> dict[str, Any]:
    return {
        "index": sample.index if sample else None,
        "rollout_id": rollout.rollout_id,
        "status": sample.status if sample else SampleStatus.FAILED,
        "response": sample.response if sample else "",
        "response_length": sample.response_length if sample else 0,
        "trained_tokens": int((sample.loss_mask > 0).sum()) if sample and not sample.remove_sample else 0,
        "reward": sample.reward if sample else None,
        **{name: getattr(rollout.verdict, name, None) for name in _VERDICT},
        "error": rollout.error,
        "seconds": rollout.seconds,
        "policy_versions": sorted({span.policy_version for span in sample.version_spans}) if sample else [],
        "metadata": sample.metadata if sample else {},
    }


def _print_json(value: dict[str, Any]) -> None:
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")


def print_run(reader: RunReader, *, step: int | None) -> None:
    """Print a run: what it is, its steps, drop reasons, waste, ledger, evaluations, and groups of the steps shown."""
    console = _console()
    record, steps = reader.run(), reader.steps()
    shown = steps[-_STEPS_WITH_GROUPS:] if step is None else (reader.step(step),)
    for line in _run_lines(reader, record):
        _print(console, line)
    if not steps:
        _print(console, "no step is committed yet")
        return
    console.print(_step_table(steps if step is None else shown))
    for line in _sum_lines(steps if step is None else shown):
        _print(console, line)
    _print(console, _ledger_line(reader))
    if step is None:
        for line in accuracy_report(
            run_curves(reader.path), width=console.width, ascii_only=console.options.ascii_only
        ):
            _print(console, line)
    for committed in shown:
        console.print()
        console.print(_group_table(committed, reader.summaries(committed.step)))
    if len(shown) < len(steps) and step is None:
        _print(console, f"groups of {step_range(steps[0].step, shown[0].step - 1)}: --step N")
    _print(console, "one group with its responses: --group G")


def print_group(found: FoundGroup) -> None:
    """Print one group whole: the prompt and every response, with reward, verdict and length."""
    console = _console()
    group, prompt = found.group, found.group.prompt
    fate = "kept" if found.drop_reason is None else f"dropped: {found.drop_reason}"
    _print(console, f"group {group.group_index} of step {found.step}, {fate}", style="bold")
    _print(console, f"source {prompt.source}, prompt {prompt.prompt_id}, {counted(len(prompt.token_ids), 'token')}")
    _print(console, f"label {_json(prompt.label)}")
    if prompt.metadata:
        _print(console, f"metadata {_json(dict(prompt.metadata))}")
    _section(console, "prompt", prompt.text)
    for rollout in group.rollouts:
        for sample in rollout.samples or (None,):
            _section(console, _sample_title(rollout, sample), sample.response if sample else "")
        if rollout.verdict is not None and rollout.verdict.detail:
            _print(console, f"detail: {rollout.verdict.detail}")
        if rollout.error is not None:
            _print(console, f"error: {rollout.error}", style="red")


def _run_lines(reader: RunReader, record: RunRecord) -> Iterator[str]:
    totals = reader.totals()
    cause = f" ({record.cause})" if record.cause else ""
    yield (
        f"{reader.path}: {reader.status()}{cause}; {counted(totals.num_steps, 'step')}, "
        f"{counted(totals.num_groups, 'group')} kept, {totals.num_dropped:,} dropped; "
        f"{counted(totals.response_tokens, 'token')} to train on, {totals.wasted_tokens:,} wasted"
    )
    by_key = flatten(dict(record.settings))
    found = [(words, by_key.get(key)) for key, words in _SETTINGS]
    yield ", ".join(f"{words} {value}" for words, value in found if value is not None)
    yield from (f"changed {change}" for change in reader.changes())
    isolation = reader.isolation()
    if isolation is not None:
        yield str(isolation)


def _sum_lines(steps: Sequence[StepRecord]) -> Iterator[str]:
    reasons: Counter[str] = Counter()
    wasted: Counter[str] = Counter()
    for record in steps:
        reasons.update(record.drop_reasons)
        wasted.update(record.wasted_tokens)
    yield "dropped groups: " + (_counts(reasons) or "none")
    yield "wasted tokens: " + (_counts(wasted) or "none")


def _ledger_line(reader: RunReader) -> str:
    counts = asdict(reader.ledger())
    drawn = counts.pop("drawn")
    parts = " + ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items() if count)
    return f"prompts: {drawn:,} drawn = {parts or '0'}"


def _step_table(steps: Sequence[StepRecord]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("step", "kept", "dropped", *(name for name, _, _ in _STEP_COLUMNS), "wasted"):
        table.add_column(name, justify="right", overflow="fold")
    for record in steps:
        metrics = [_metric(record.metrics.get(key), form) for _, key, form in _STEP_COLUMNS]
        wasted = f"{sum(record.wasted_tokens.values()):,}"
        table.add_row(str(record.step), str(record.num_groups), str(record.num_dropped), *metrics, wasted)
    return table


def _group_table(record: StepRecord, groups: Sequence[GroupSummary]) -> Table:
    title = f"step {record.step}, policy version {record.policy_version}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, expand=False)
    table.add_column("group", justify="right")
    for name in ("source", "question", "rewards", "tokens", "fate"):
        table.add_column(name, overflow="fold")
    for group in groups:
        kept = group.drop_reason is None
        table.add_row(
            str(group.group_index),
            Text(_visible(group.source)),
            Text(_shortened(group.question)),
            " ".join(_member_reward(member) for member in group.members) or "-",
            " ".join(str(member.response_length) for member in group.members) or "-",
            Text("kept" if kept else f"dropped: {_visible(group.drop_reason or '')}", style="green" if kept else "red"),
        )
    return table


def _sample_title(rollout: Rollout, sample: Sample | None) -> str:
    verdict = rollout.verdict
    parts = [f"rollout {rollout.rollout_id}", (sample.status if sample else SampleStatus.FAILED).value]
    if sample:
        parts = [f"sample {sample.index}", *parts, counted(sample.response_length, "token")]
        parts.append("not scored" if sample.reward is None else f"reward {_json(sample.reward)}")
    if verdict and verdict.correct is not Correct.UNDEFINED:
        parts.append("correct" if verdict.correct is Correct.YES else "wrong")
    if verdict and verdict.extracted is not None:
        parts.append(f"extracted {_json(verdict.extracted)}")
    return ", ".join(parts)


def _member_reward(member: MemberSummary) -> str:
    if member.reward is not None:
        return f"{member.reward:.3g}"
    return "failed" if member.status is SampleStatus.FAILED else "-"


def _console() -> Console:
    console = Console(highlight=False, markup=False, emoji=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, emoji=False, width=_PIPE_WIDTH)


def _print(console: Console, text: str, *, style: str = "") -> None:
    # Soft: the terminal wraps long lines, rich does not cut them.
    console.print(Text(_visible(text), style=style), soft_wrap=True)


def _section(console: Console, title: str, text: str) -> None:
    console.print()
    _print(console, f"-- {title}", style="bold")
    _print(console, text)


def _visible(text: str) -> str:
    """Return text whose control characters, which could command a terminal, are spelled out."""
    return "".join(
        character if character in "\n\t" or unicodedata.category(character) != "Cc" else f"\\x{ord(character):02x}"
        for character in text
    )


def _shortened(text: str) -> str:
    words = _visible(" ".join(text.split()))
    return words if len(words) <= _QUESTION_CHARACTERS else words[: _QUESTION_CHARACTERS - 1] + "…"


def _metric(value: float | None, form: str) -> str:
    return "-" if value is None or not math.isfinite(value) else format(value, form)


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()) if count)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
