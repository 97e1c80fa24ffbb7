"""Files of samples, read a record at a time: JSON lines, and what slime saves with PyTorch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollfeed.errors import ConfigError, DataError
from rollfeed.lint.foreign import subjects_of
from rollfeed.lint.subject import Subject

SAMPLES = "samples.jsonl"
"""What a gateway writes of its finished sessions."""
_SUFFIXES = (".jsonl", ".pt")
_NUMBERS = re.compile(r"(\d+)")


def sample_files(path: Path) -> list[Path]:
    """Return the files of samples at a path: itself, a gateway's, or those in a folder, steps in their order.

    Raises:
        ConfigError: If there are none.
    """
    if path.is_file() and path.suffix in _SUFFIXES:
        return [path]
    if (path / SAMPLES).exists():
        return [path / SAMPLES]
    found = [each for each in path.rglob("*") if each.suffix in _SUFFIXES and each.is_file()] if path.is_dir() else []
    if not found:
        raise ConfigError(
            f"{path}: no samples there; give a run directory, the folder of a gateway, .pt files of slime, or JSON "
            "lines of verl or prime-rl"
        )
    return sorted(found, key=lambda each: [int(part) if part.isdigit() else part for part in _NUMBERS.split(str(each))])


def read_subjects(path: Path) -> Iterator[Subject]:
    """Yield the samples of a file.

    Raises:
        ConfigError: If PyTorch is needed and not there, or a file has more than tensors and plain values.
        DataError: If a record is in no known form; names the line.
    """
    for where, record in _saved(path) if path.suffix == ".pt" else _lines(path):
        try:
            if not isinstance(record, Mapping):
                raise ValueError("not an object")
            nested = record.get("sample")
            yield from subjects_of(nested if isinstance(nested, Mapping) else record, where)
        except ValueError as error:
            raise DataError(f"{where}: {error}") from None


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            where = f"{path.name}, line {number}"
            try:
                if line.strip():
                    yield where, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}, line {number}: no JSON: {error}") from None


def _saved(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import torch
    except ModuleNotFoundError:
        raise ConfigError(f"{path}: needs PyTorch to be read: pip install 'rollfeed[local]'") from None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds, as pickles are programs
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{path}: is damaged, or has more than tensors and plain values, which could run code: {reason}"
        ) from None
    samples = content.get("samples") if isinstance(content, Mapping) else None
    if not isinstance(samples, list):
        raise DataError(f"{path}: no saved rollout of slime: it has no list of samples")
    for number, sample in enumerate(samples):
        yield f"{path.name}, sample {number}", sample
