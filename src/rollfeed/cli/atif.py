"""``rollfeed atif``: samples as trajectories of the Agent Trajectory Interchange Format, and back."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rollfeed.app import load_settings_model, stored_spec
from rollfeed.base.atomic import replace_file
from rollfeed.cli import exit_codes
from rollfeed.cli.arguments import Parsers, add_actions, add_command, add_path, path_argument
from rollfeed.errors import ConfigError, DataError
from rollfeed.prompts import load_tokenizer
from rollfeed.store import RunReader
from rollfeed.store.layout import JOURNAL
from rollfeed.types import Prompt, Sample
from rollfeed.types.text import counted

_SAMPLES, _CONVERSATIONS = "samples.jsonl", "conversations.jsonl"


def register(commands: Parsers) -> None:
    """Add the command to the parser."""
    actions = add_actions(commands, "atif")
    write = add_command(
        actions,
        "export",
        _export,
        help="write the samples of a run or a gateway as trajectories, a file each",
        epilog="example: rollfeed atif export runs/demo --out trajectories/ --step 3",
    )
    write.add_argument("path", metavar="RUN", type=path_argument, help="a run directory, or the folder of a gateway")
    add_path(write, "--out", "DIR", "where the trajectories go", required=True)
    write.add_argument("--step", type=int, metavar="N", help="only this step of a run")
    add_path(write, "--tokenizer", "DIR", "the policy's tokenizer (default: the run's)")
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
    from rollfeed.atif import trajectory_of

    path, folder = arguments.path, arguments.tokenizer
    model_name = "" if folder is None else folder.name
    if (path / JOURNAL).exists():
        model = load_settings_model(stored_spec(path).settings)
        model_name, found = model.checkpoint.name, _run_samples(path, arguments.step)
        tokenizer = model.tokenizer if folder is None else load_tokenizer(folder)
    elif folder is None:
        raise ConfigError(f"{path}: is no run directory; for the samples of a gateway give --tokenizer, too")
    else:
        tokenizer, found = load_tokenizer(folder), _saved_samples(path)
    arguments.out.mkdir(parents=True, exist_ok=True)
    count = 0
    for prompt, sample in found:
        session = sample.metadata.get("session_id", f"group-{sample.group_index}-rollout-{sample.rollout_id}")
        trajectory = trajectory_of(
            sample,
            prompt=prompt,
            tokenizer=tokenizer,
            model_name=model_name,
            version=version("rollfeed"),
            session_id=str(session),
        )
        _write(arguments.out / f"sample-{sample.group_index}-{sample.index}.json", [trajectory])
        count += 1
    print(f"{counted(count, 'trajectory', 'trajectories')} in {arguments.out}")
    return exit_codes.DONE


def _run_samples(path: Path, step: int | None) -> Iterator[tuple[Prompt | None, Sample]]:
    with RunReader(path) as reader:
        for number in [record.step for record in reader.steps()] if step is None else [step]:
            for group in reader.batch(number).groups:
                yield from ((group.prompt, sample) for sample in group.samples)


def _saved_samples(path: Path) -> Iterator[tuple[Prompt | None, Sample]]:
    for where, record in _records([path / _SAMPLES if path.is_dir() else path]):
        try:
            yield None, Sample.from_dict(record)
        except (ValueError, TypeError) as error:
            raise DataError(f"{where}: no sample: {error}") from None


def _import(arguments: argparse.Namespace) -> int:
    from rollfeed.atif import conversation_of, samples_of

    samples: list[dict[str, Any]] = []
    conversations: list[dict[str, Any]] = []
    for number, (where, trajectory) in enumerate(_records(arguments.files)):
        try:
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


def _records(paths: list[Path]) -> Iterator[tuple[str, Any]]:
    for path in paths:
        found = sorted(each for each in path.rglob("*.json*") if each.is_file()) if path.is_dir() else [path]
        if not found:
            raise ConfigError(f"{path}: no .json or .jsonl files there")
        for file in found:
            try:
                with file.open(encoding="utf-8") as opened:
                    lines = list(opened) if file.suffix == ".jsonl" else [opened.read()]
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield f"{file}, line {number}" if len(lines) > 1 else str(file), json.loads(line)
            except (OSError, ValueError, RecursionError) as error:
                raise DataError(f"{file}: cannot be read: {error}") from None


def _write(path: Path, records: list[dict[str, Any]]) -> None:
    content = "".join(json.dumps(record) + "\n" for record in records).encode()
    replace_file(path, lambda file: file.write(content))
