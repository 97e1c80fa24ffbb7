"""``rollfeed show``: the contents of a run directory, for people and for scripts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rollfeed.cli.arguments import Parsers, add_command, add_flags, path_argument
from rollfeed.cli.show_run import print_run, run_advice
from rollfeed.cli.show_runs import comparison_view, print_comparison, print_runs
from rollfeed.cli.show_samples import found_view, group_view, print_found, print_group
from rollfeed.cli.shown import console, number_text, print_json, print_line
from rollfeed.errors import ConfigError, RunDirectoryError, in_one_line
from rollfeed.store import GroupSummary, RunReader, StepRecord
from rollfeed.store.finding import FoundSample, SampleFilter, advantages_of, find_answers, find_samples
from rollfeed.store.layout import ANSWERS_FILE, JOURNAL, RESULT_FILE

_EPILOG = """DIR is a run, a training, the folder of `rollfeed eval`, or a folder of runs, which is listed; of several
DIRs the settings that differ and what came of them stand side by side. A filter has conditions that all hold, with
commas between them: reward, length, group and step with < <= > >= = !=; source, finish (stop, length, abort), reason,
prompt, response, label, extracted, detail, error and prompt_id with = != and ~ (contains; a text with a comma in double
quotes); and the words wrong, right, failed, truncated, empty, unscored, kept and dropped.

examples:
  rollfeed show runs                         the runs in a folder
  rollfeed show runs/demo                    the run, a line a step, and what goes wrong in it
  rollfeed show runs/demo --step 2           one step and its groups
  rollfeed show runs/demo --worst 5          the samples of the lowest rewards
  rollfeed show runs/demo --wrong --filter 'source=sums, step>100'
  rollfeed show runs/demo --group 5          one group whole, with the text of its responses
  rollfeed show runs/demo --sample 5.0       its first member, with what is known of its tokens
  rollfeed show runs/first runs/second       two runs side by side
  rollfeed show runs/demo --json             one JSON object, for scripts
"""
_SUMMARY = ("group_index", "prompt_id", "source", "question", "prompt", "drop_reason")
_LINES, _SAMPLES = 30, 10
"""Lines of steps, groups or runs, and samples, where no other number is asked for."""
_MOST_ANSWERS = 100_000
"""To one index of an evaluation's sets, of which one is asked for."""
_MOST_SUMMARIES = 100_000
"""Samples of a run from which --json has no groups, without --step."""


def register(commands: Parsers) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "show",
        run,
        description="Print the steps of a run, its samples, rewards, lengths, drop reasons and waste, and what goes "
        "wrong in it. Works while the run goes on, and after it was killed.",
        epilog=_EPILOG,
    )
    told = "a run directory, that of an evaluation, or a folder of runs; several are compared"
    parser.add_argument("directories", type=path_argument, metavar="DIR", nargs="+", help=told)
    parser.add_argument("--step", type=int, metavar="N", help="only this step, with its groups")
    parser.add_argument("--group", type=int, metavar="G", help="one group whole, by its index")
    parser.add_argument("--sample", metavar="G.M", help="member M of group G whole, counted from 0")
    told = "the N samples of the lowest rewards (default 10)"
    parser.add_argument("--worst", type=_count, metavar="N", nargs="?", const=_SAMPLES, help=told)
    told = "samples that fulfil conditions, such as 'reward<0.2, source=sums'; newest steps first"
    parser.add_argument("--filter", metavar="EXPR", help=told)
    told = "lines or samples at most (default 30 lines, 10 samples)"
    parser.add_argument("--limit", type=_count, metavar="N", help=told)
    wrong = "samples that are wrong, as their grader says, or of a reward below 1 where it does not; newest steps first"
    add_flags(parser, wrong=wrong, compare="the runs of a folder side by side", json="one JSON object and nothing else")


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("give a number from 1 on")
    return number


def run(arguments: argparse.Namespace) -> int:
    """Print what was asked for and return 0.

    Raises:
        ConfigError: If options do not go together, or a filter is wrong.
        RunDirectoryError: If there is no run, step, group or sample there, or it cannot be read.
    """
    paths: list[Path] = arguments.directories
    folder = paths[0]
    is_run, is_evaluation = (folder / JOURNAL).exists(), (folder / ANSWERS_FILE).exists()
    within = [name for name in ("step", "group", "sample", "worst", "wrong", "filter") if _is_given(arguments, name)]
    if len(paths) > 1 or (folder.is_dir() and not is_run and not is_evaluation):
        if within:
            raise ConfigError(f"--{within[0]}: looks into one run; give its directory alone")
        _show_runs(arguments, folder, paths)
        return 0
    if arguments.compare:
        raise ConfigError(f"--compare: {folder} is no folder of runs; give several directories")
    if is_evaluation and not is_run:
        _show_evaluation(arguments, folder, within)
        return 0
    if "sample" in within and (others := {"group", "worst", "wrong", "filter"} & set(within)):
        raise ConfigError(f"--sample is one sample; leave out --{min(others)}")
    with RunReader(folder) as reader:
        if {"worst", "wrong", "filter"} & set(within):
            num, worst = _num_samples(arguments), arguments.worst is not None
            _show_found(arguments, *find_samples(reader, _filter(arguments), num=num, worst=worst))
        elif arguments.group is not None or arguments.sample is not None:
            _show_group(arguments, reader)
        elif arguments.json:
            print_json(run_view(reader, step=arguments.step))
        else:
            print_run(console(), reader, step=arguments.step, limit=arguments.limit or _LINES)
    return 0


def _is_given(arguments: argparse.Namespace, name: str) -> bool:
    return getattr(arguments, name) not in (None, False)


def _num_samples(arguments: argparse.Namespace) -> int:
    num: int = arguments.limit or arguments.worst or _SAMPLES
    return num


def _filter(arguments: argparse.Namespace, *more: str) -> SampleFilter:
    wrong = ["wrong"] if arguments.wrong else []
    numbers = [f"{name}={value}" for name in ("step", "group") if (value := getattr(arguments, name)) is not None]
    return SampleFilter(*more, *wrong, *numbers, *([] if arguments.filter is None else [arguments.filter]))


def _show_runs(arguments: argparse.Namespace, folder: Path, paths: Sequence[Path]) -> None:
    """Print the runs of a folder as a list, or them or those at several paths side by side."""
    from rollfeed.viewer.found_runs import find_runs, is_evaluation, list_line  # which takes a while

    found = {str(path): path for path in paths} if len(paths) > 1 else find_runs(paths)
    if not arguments.compare and len(paths) == 1:
        lines = [list_line(name, path) for name, path in found.items()]
        if arguments.json:
            print_json({"runs": [{**line, "directory": str(found[line["name"]])} for line in lines]})
        else:
            print_runs(console(), folder, lines, limit=arguments.limit or _LINES)
        return
    runs = [path for path in found.values() if not is_evaluation(path)]
    if len(runs) < len(paths):
        raise ConfigError("evaluations are compared by `rollfeed eval --compare A B`; give directories of runs")
    for path in runs if len(paths) > 1 else ():
        RunReader(path).close()  # there must be one
    if arguments.json:
        print_json(comparison_view(runs))
    else:
        print_comparison(console(), runs)


def _show_found(
    arguments: argparse.Namespace, found: Sequence[FoundSample], has_more: bool, *, is_whole: bool = False
) -> None:
    if arguments.json:
        print_json(found_view(found, has_more=has_more))
    else:
        print_found(console(), found, has_more=has_more, is_whole=is_whole)


def _show_group(arguments: argparse.Namespace, reader: RunReader) -> None:
    group, member = (arguments.group, None) if arguments.sample is None else _place(arguments.sample)
    found = reader.group(group, step=arguments.step)
    advantages = advantages_of(reader, found)
    if arguments.json:
        print_json(group_view(found, member, advantages))
    else:
        print_group(console(), found, member, advantages)


def _place(text: str) -> tuple[int, int]:
    group, dot, member = text.partition(".")
    if not dot or not group.isdecimal() or not member.isdecimal():
        raise ConfigError(f"--sample {text}: write it as GROUP.MEMBER, such as 5.0")
    return int(group), int(member)


def _show_evaluation(arguments: argparse.Namespace, folder: Path, within: Sequence[str]) -> None:
    """Print an evaluation of `rollfeed eval`: its sets, or answers of it."""
    if refused := {"step", "group"} & set(within):
        raise ConfigError(f"--{refused.pop()}: an evaluation has none; use --sample, --wrong, --worst or --filter")
    if within:
        num, worst, asked = _num_samples(arguments), arguments.worst is not None, _filter(arguments)
        member = None
        if arguments.sample is not None:
            group, member = _place(arguments.sample)
            num, asked = _MOST_ANSWERS, _filter(arguments, f"group={group}")
        found, has_more = find_answers(folder / ANSWERS_FILE, asked, num=num, worst=worst)
        found = [each for each in found if member in (None, each.member)]
        if member is not None and not found:
            raise RunDirectoryError(f"{folder}: has no answer {arguments.sample}; --filter 'source=SET' lists them")
        _show_found(arguments, found, has_more, is_whole=member is not None)
        return
    try:
        result = json.loads((folder / RESULT_FILE).read_bytes())
        lines = [line for name, found in result["sets"].items() for line in _set_lines(name, found)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        path = folder / RESULT_FILE
        raise RunDirectoryError(f"{path}: cannot be read ({in_one_line(error)}); make the evaluation again") from None
    if arguments.json:
        print_json(result)
        return
    more = "more: --wrong, --worst, --filter 'source=SET', --sample I.N"
    for line in (f"{folder}: evaluation of {result.get('model', 'a model')}", *lines, more):
        print_line(console(), line)


def _set_lines(name: str, found: Mapping[str, Any]) -> tuple[str, str]:
    accuracy, reward = number_text(found["accuracy"], ".1%"), number_text(found["reward_mean"], ".4f")
    return (
        f"{name}: {found['num_prompts']} prompts x {found['n_samples_per_prompt']} answers",
        f"  accuracy {accuracy} ({found['accuracy_low']:.1%} to {found['accuracy_high']:.1%}), reward {reward}",
    )


def run_view(reader: RunReader, *, step: int | None) -> dict[str, Any]:
    """Return a run as JSON values: all steps, or one."""
    record, isolation = reader.run(), reader.isolation()
    steps = reader.steps() if step is None else (reader.step(step),)
    totals = reader.totals()
    has_groups = step is not None or totals.num_samples <= _MOST_SUMMARIES
    trained = reader.updates()
    return {
        "run": {
            "directory": str(reader.path),
            "status": reader.status(),
            "cause": record.cause,
            "settings": record.settings,
            "changes": [asdict(change) for change in reader.changes()],
            "isolation": None if isolation is None else asdict(isolation),
        },
        "steps": [
            {**_step_view(each, reader.summaries(each.step) if has_groups else None), "train": trained.get(each.step)}
            for each in steps
        ],
        "eval": eval_view(reader.evaluations()),
        "exports": reader.exports(),
        "totals": asdict(totals),
        "ledger": asdict(reader.ledger()),
        "advice": [asdict(each) for each in run_advice(reader)],
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


def _step_view(record: StepRecord, groups: Sequence[GroupSummary] | None) -> dict[str, Any]:
    """Return a step, with its groups where they are given; those of large runs are null."""
    kept = dropped = None
    if groups is not None:
        kept = [_summary_view(group) for group in groups if group.drop_reason is None]
        dropped = [_summary_view(group) for group in groups if group.drop_reason is not None]
    return {**asdict(record), "groups": kept, "dropped": dropped}


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
