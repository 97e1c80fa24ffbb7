"""A run as `rollfeed show` prints it: what it is, a line a step, what it wasted, what goes wrong, groups of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from rollfeed.cli.shown import counts_text, number_text, print_line, print_table
from rollfeed.config.settings import flatten
from rollfeed.report import Advice, Curves, accuracy_report, advice_of, curves_of
from rollfeed.store import GroupSummary, MemberSummary, RunReader, StepRecord
from rollfeed.types import SampleStatus
from rollfeed.types.text import counted

_MOST_CELLS = 24  # for the rewards of a group, each with its own
_SETTINGS: tuple[tuple[str, str], ...] = (
    ("model.checkpoint", "model"),
    ("rollout.rollout_batch_size", "groups a step"),
    ("rollout.n_samples_per_prompt", "samples a prompt"),
    ("sampling.rollout_temperature", "temperature"),
    ("sampling.rollout_max_response_len", "response tokens at most"),
    ("rollout.deterministic", "deterministic"),
    ("seed", "seed"),
)
_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("reward", "rollout/reward_mean", ".3f"),
    ("right", "rollout/correct_ratio", ".0%"),
    ("length", "rollout/response_length_mean", ".1f"),
    ("cut", "rollout/truncated_ratio", ".0%"),
)
_TRAIN_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("loss", "train/loss", ".4f"),
    ("grad", "train/grad_norm", ".3g"),
    ("entropy", "train/entropy", ".3f"),
)


def run_advice(reader: RunReader, steps: Sequence[StepRecord] | None = None) -> tuple[Advice, ...]:
    """Return what the numbers of a run say goes wrong, and which settings change it.

    Raises:
        RunDirectoryError: If the run is damaged.
    """
    return advice_of(
        settings=reader.run().settings,
        metrics=_metrics(reader.steps() if steps is None else steps),
        trained=reader.updates().values(),
        evaluations=reader.evaluations(),
    )


def _metrics(steps: Sequence[StepRecord]) -> list[dict[str, Any]]:
    return [{**record.metrics, "step": record.step} for record in steps]


def print_run(to: Console, reader: RunReader, *, step: int | None = None, limit: int) -> None:
    """Print a run, or one step of it with its groups; at most ``limit`` steps or groups, the newest steps."""
    steps = reader.steps() if step is None else (reader.step(step),)
    curves, advice = _curves(reader, steps), run_advice(reader, steps)  # read before anything is printed
    for line in _run_lines(reader):
        print_line(to, line)
    if not steps:
        print_line(to, "no step is committed yet")
        return
    to.print()
    _print_steps(to, steps[-limit:], reader.updates())
    to.print()
    if len(steps) > limit:
        print_line(to, f"the newest {limit} of {len(steps):,} steps; --limit {len(steps)} shows all, --step N one")
    wasted = Counter[str]()
    reasons = Counter[str]()
    for record in steps:
        reasons.update(record.drop_reasons)
        wasted.update(record.wasted_tokens)
    print_line(to, f"dropped groups: {counts_text(reasons) or 'none'}")
    print_line(to, f"wasted tokens: {counts_text(wasted) or 'none'}")
    if step is not None:
        _print_groups(to, steps[0], reader.summaries(step), limit=limit)
        return
    counts = asdict(steps[-1].ledger)
    drawn = counts.pop("drawn")
    parts = " + ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items() if count)
    print_line(to, f"prompts: {drawn:,} drawn = {parts or '0'}")
    for line in accuracy_report(curves, width=to.width, ascii_only=to.options.ascii_only):
        print_line(to, line)
    for each in advice:
        print_line(to, f"advice: {each.text}", style="yellow")
    print_line(to, "more: --step N, --group G, --sample G.M, --worst, --wrong, --filter 'reward<0.2'")


def _curves(reader: RunReader, steps: Sequence[StepRecord]) -> Curves:
    return curves_of(evaluations=reader.evaluations(), trained=reader.updates().values(), metrics=_metrics(steps))


def _run_lines(reader: RunReader) -> Iterator[str]:
    record, totals = reader.run(), reader.totals()
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
    if exports := reader.exports():
        yield f"exports {', '.join(f'{name}{_facts_text(facts)}' for name, facts in exports.items())}"
    isolation = reader.isolation()
    if isolation is not None:
        yield str(isolation)


def _facts_text(facts: Mapping[str, float]) -> str:
    return f" ({', '.join(f'{name} {round(value, 4)}' for name, value in facts.items())})" if facts else " (damaged)"


def _print_steps(to: Console, steps: Sequence[StepRecord], by_step: Mapping[int, Mapping[str, Any]]) -> None:
    known = _TRAIN_COLUMNS if by_step else ()
    rows = [
        (
            *(str(record.step), str(record.num_groups), str(record.num_dropped)),
            *(number_text(record.metrics.get(key), form) for _, key, form in _COLUMNS),
            *(number_text(by_step.get(record.step, {}).get(key), form) for _, key, form in known),
            number_text(record.metrics.get("perf/tokens_per_second"), ".0f"),
            f"{sum(record.wasted_tokens.values()):,}",
        )
        for record in steps
    ]
    names = ("step", "kept", "drop", *(name for name, _, _ in (*_COLUMNS, *known)), "tok/s", "wasted")
    told = [at for at in range(len(names)) if any(row[at] != "-" for row in rows)]
    print_table(to, [names[at] for at in told], [[row[at] for at in told] for row in rows])


def _print_groups(to: Console, record: StepRecord, groups: Sequence[GroupSummary], *, limit: int) -> None:
    to.print()
    print_line(to, f"step {record.step}, policy version {record.policy_version}", style="bold")
    has_sources = len({group.source for group in groups}) > 1
    rows = [
        (
            str(group.group_index),
            _rewards(group.members),
            _lengths(group.members),
            "kept" if group.drop_reason is None else f"dropped: {group.drop_reason}",
            f"{group.source}: {group.question}" if has_sources else group.question,
        )
        for group in groups[:limit]
    ]
    names = ("group", "rewards", "tokens", "fate", "question")
    print_table(to, names, rows, left=names[1:])
    if len(groups) > limit:
        print_line(to, f"the first {limit} of {len(groups):,} groups; --limit {len(groups)} shows all")
    print_line(to, "one group with its responses: --group G")


def _rewards(members: Sequence[MemberSummary]) -> str:
    text = " ".join(map(_reward, members))
    if len(text) <= _MOST_CELLS:
        return text or "-"
    known = [member.reward for member in members if member.reward is not None]
    return f"mean {sum(known) / len(known):.3g} of {len(known)}" if known else f"{len(members)} without"


def _reward(member: MemberSummary) -> str:
    if member.reward is not None:
        return f"{member.reward:.3g}"
    return "failed" if member.status is SampleStatus.FAILED else "-"


def _lengths(members: Sequence[MemberSummary]) -> str:
    lengths = sorted({member.response_length for member in members})
    return "-".join(map(str, dict.fromkeys((lengths[0], lengths[-1])))) if lengths else "-"
