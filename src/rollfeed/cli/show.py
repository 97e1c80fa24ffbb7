"""``rollfeed show``: what a run directory holds, for people and for scripts."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rollfeed.cli.arguments import path_argument
from rollfeed.cli.show_text import print_group, print_run
from rollfeed.store import FoundGroup, GroupSummary, RunReader, StepRecord, question_of
from rollfeed.types import Rollout, Sample, SampleStatus

_EXAMPLE = """\
examples:
  rollfeed show runs/demo                    the run, its steps and their groups
  rollfeed show runs/demo --step 2           one step
  rollfeed show runs/demo --group 5          one group whole, with the text of its responses
  rollfeed show runs/demo --json             one JSON object, for scripts
"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser; ``arguments.run`` becomes :func:`run`."""
    parser = subparsers.add_parser(
        "show",
        help="print the steps, groups, rewards and drop reasons of a run",
        description="Print the steps of a run, their groups, rewards, lengths, drop reasons and waste. "
        "Works while the run goes on, and after it was killed.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=path_argument, metavar="DIR", help="the directory that `rollfeed run` wrote")
    parser.add_argument("--step", type=int, metavar="N", help="only this step")
    parser.add_argument("--group", type=int, metavar="G", help="one group whole, by its index")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.set_defaults(run=run)


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
        "group_index": group.group_index,
        "prompt_id": group.prompt_id,
        "source": group.source,
        "question": group.question,
        "prompt": group.prompt,
        "drop_reason": group.drop_reason,
        "rewards": [member.reward for member in members],
        "correct": [member.correct for member in members],
        "statuses": [member.status for member in members],
        "response_lengths": [member.response_length for member in members],
        "errors": [member.error for member in members if member.error is not None],
    }


def _sample_view(rollout: Rollout, sample: Sample | None) -> dict[str, Any]:
    verdict = rollout.verdict
    return {
        "index": sample.index if sample else None,
        "rollout_id": rollout.rollout_id,
        "status": sample.status if sample else SampleStatus.FAILED,
        "response": sample.response if sample else "",
        "response_length": sample.response_length if sample else 0,
        "trained_tokens": int((sample.loss_mask > 0).sum()) if sample and not sample.remove_sample else 0,
        "reward": sample.reward if sample else None,
        "correct": verdict.correct if verdict else None,
        "format_ok": verdict.format_ok if verdict else None,
        "extracted": verdict.extracted if verdict else None,
        "outcome": verdict.outcome if verdict else None,
        "detail": verdict.detail if verdict else None,
        "error": rollout.error,
        "seconds": rollout.seconds,
        "policy_versions": sorted({span.policy_version for span in sample.version_spans}) if sample else [],
        "metadata": sample.metadata if sample else {},
    }


def _print_json(value: dict[str, Any]) -> None:
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")
