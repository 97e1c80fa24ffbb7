"""``rollfeed atif``: samples as trajectories of the Agent Trajectory Interchange Format, and back."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rollfeed.app import load_settings_model, stored_spec
from rollfeed.atif import check_trajectory, conversation_of, samples_of, trajectory_of
from rollfeed.base.atomic import replace_file
from rollfeed.cli import exit_codes
from rollfeed.cli.arguments import Parsers, add_actions, add_command, add_path, path_argument
from rollfeed.errors import ConfigError, DataError
from rollfeed.store import RunReader
from rollfeed.types.text import counted

_SAMPLES, _CONVERSATIONS = "samples.jsonl", "conversations.jsonl"


def register(commands: Parsers) -> None:
    """Add the command to the parser."""
    actions = add_actions(commands, "atif", help="write samples as ATIF trajectories, or read them")
    write = add_command(
        actions,
        "export",
        _export,
        help="write the samples of a run as trajectories, a file each",
        epilog="example: rollfeed atif export runs/demo --out trajectories/ --step 3",
    )
    write.add_argument("directory", metavar="RUN", type=path_argument, help="the directory that `rollfeed run` wrote")
    add_path(write, "--out", "DIR", "where the trajectories go", required=True)
    write.add_argument("--step", type=int, metavar="N", help="only this step")
    read = add_command(
        actions,
        "import",
        _import,
        help="make samples of trajectories with token ids and logprobs, and conversations of the others",
        description=f"Make samples ({_SAMPLES}) of trajectories with token ids and logprobs of every turn, and rows "
        f"for supervised learning ({_CONVERSATIONS}) of the others.",
        epilog="example: rollfeed atif import trajectories/ --out data/",
    )
    read.add_argument("files", metavar="PATH", type=path_argument, nargs="+", help=".json, .jsonl, or folders of them")
    add_path(read, "--out", "DIR", "where the two files go", required=True)


def _export(arguments: argparse.Namespace) -> int:
    model = load_settings_model(stored_spec(arguments.directory).settings)
    arguments.out.mkdir(parents=True, exist_ok=True)
    count = 0
    with RunReader(arguments.directory) as reader:
        steps = [record.step for record in reader.steps()] if arguments.step is None else [arguments.step]
        for step in steps:
            for group in reader.batch(step).groups:
                for sample in group.samples:
                    trajectory = trajectory_of(
                        sample,
                        prompt=group.prompt,
                        tokenizer=model.tokenizer,
                        model_name=str(model.checkpoint.name),
                        version=version("rollfeed"),
                        session_id=f"group-{group.group_index}-rollout-{sample.rollout_id}",
                    )
                    _write(arguments.out / f"{trajectory['trajectory_id']}.json", [trajectory])
                    count += 1
    print(f"{counted(count, 'trajectory', 'trajectories')} in {arguments.out}")
    return exit_codes.DONE


def _import(arguments: argparse.Namespace) -> int:
    samples: list[dict[str, Any]] = []
    conversations: list[dict[str, Any]] = []
    for number, (where, trajectory) in enumerate(_trajectories(arguments.files)):
        try:
            check_trajectory(trajectory)
            made = samples_of(trajectory, index=len(samples), rollout_id=number)
            samples += [sample.to_dict() for sample in made]
            conversations += [] if made else [conversation_of(trajectory)]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{where}: no ATIF trajectory: {error}") from None
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, records in ((_SAMPLES, samples), (_CONVERSATIONS, conversations)):
        if records:
            _write(arguments.out / name, records)
    made_of = f"{counted(len(samples), 'sample')}, {counted(len(conversations), 'conversation')}"
    print(f"{made_of} in {arguments.out}")
    return exit_codes.DONE


def _trajectories(paths: list[Path]) -> Iterator[tuple[str, Any]]:
    for path in paths:
        found = sorted(each for each in path.rglob("*.json*") if each.is_file()) if path.is_dir() else [path]
        if not found:
            raise ConfigError(f"{path}: no .json or .jsonl files there")
        for file in found:
            try:
                text = file.read_text(encoding="utf-8")
                lines = text.splitlines() if file.suffix == ".jsonl" else [text]
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield f"{file}, line {number}" if len(lines) > 1 else str(file), json.loads(line)
            except (OSError, ValueError) as error:
                raise DataError(f"{file}: cannot be read: {error}") from None


def _write(path: Path, records: list[dict[str, Any]]) -> None:
    content = "".join(json.dumps(record) + "\n" for record in records).encode()
    replace_file(path, lambda file: file.write(content))
