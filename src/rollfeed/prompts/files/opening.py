"""From the path of a data set to its rows: a file, several, a folder, a data set of the hub, or a slice of these."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from rollfeed.errors import DataError, suggestion
from rollfeed.prompts.files.column_files import ArrowFile, ParquetFile
from rollfeed.prompts.files.raw_rows import RawRow, RowFile
from rollfeed.prompts.files.text_files import COMPRESSIONS, CellFile, JsonFile

_BOUND = "(?:-?[0-9]{1,18})?"
_SLICE = re.compile(rf"(?P<path>.*)@\[(?P<start>{_BOUND}):(?P<stop>{_BOUND})\]", re.DOTALL)
_TEXTS = (".jsonl", ".json", ".csv", ".tsv")
KINDS = (*_TEXTS, ".parquet", ".arrow")
"""Ends of the names of files; those of texts may have one of ``COMPRESSIONS`` behind them."""
_SHOWN_KINDS = f"{', '.join(KINDS[:-1])} or {KINDS[-1]}"
_SPLITS = dict(train="train", validation="validation", valid="validation", val="validation", dev="validation")
_SPLITS |= {"test": "test", "eval": "test"}
"""What a split is called in names of files, and what we call it."""
_NO_ROWS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json")
"""What lies beside the rows of a data set."""
_HUB_NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]+)(?P<inside>(?:/[\w.-]+)*)")


class PromptFile(NamedTuple):
    """The wanted rows of a data set, read as they are asked for; what cannot be read then is a DataError."""

    path: Path
    name: str
    """Short, for people: a file's stem, or the name of a folder."""
    columns: tuple[str, ...] | None
    """Of files that have the same for all rows; None where every row has its own."""
    rows: Iterator[RawRow]


def open_prompt_file(path: str, *, columns: Collection[str] | None, split: str | None = None) -> PromptFile:
    """Open ``path`` or ``path@[start:stop]``; a file whose whole name is ``path`` comes first.

    Args:
        path: Of a file; of a folder with files of one kind, or that `datasets` saved; a pattern with ``*``; or the
            name of a data set of the hub. Slice bounds are as in Python: negative ones count from the end, either may
            be left out.
        columns: Of files of columns only these are read; None for all.
        split: The files of a folder whose names say so, or the split of what `datasets` saved.

    Raises:
        DataError: If a file is missing, not a file, unreadable, empty or of an unknown kind, or the slice selects
            nothing.
    """
    place, start, stop = _split_slice(path)
    files = [_opened(file, columns) for file in _find(place, split)]
    shown = files[0].path if len(files) == 1 else Path(place)
    chosen = _select(range(sum(map(len, files))), start, stop, shown)
    known = [each.columns for each in files if each.columns is not None]
    common = tuple(name for name in known[0] if all(name in each for each in known)) if known else None
    return PromptFile(shown, _name(place, shown), common, _rows(files, chosen))


def _rows(files: Sequence[RowFile], chosen: range) -> Iterator[RawRow]:
    for file, end in zip(files, accumulate(map(len, files)), strict=True):
        first = end - len(file)
        wanted = range(max(chosen.start - first, 0), min(chosen.stop - first, len(file)))
        for row in file.read(wanted) if wanted else ():
            yield row._replace(number=row.number + first)


def _opened(path: Path, columns: Collection[str] | None) -> RowFile:
    kind = _kind(path)
    if kind in (".jsonl", ".json"):
        return JsonFile(path, kind=kind)
    if kind in (".csv", ".tsv"):
        return CellFile(path, kind=kind)
    return (ParquetFile if kind == ".parquet" else ArrowFile)(path, wanted=columns)


def _kind(path: Path) -> str | None:
    """Return the end of a file's name that says what is in it; None where it is none that can be read."""
    ends = [end.lower() for end in path.suffixes]
    if len(ends) > 1 and ends[-1] in COMPRESSIONS and ends[-2] in _TEXTS:
        return ends[-2]
    return ends[-1] if ends and ends[-1] in KINDS else None


def _name(place: str, path: Path) -> str:
    """Return the stem of a file; for several, the last name in their path that is neither a pattern nor a file's."""
    if Path(place).is_dir():
        return Path(os.path.abspath(place)).name
    if _kind(Path(place)) is None or not path.is_file():
        parts = [part for part in Path(place).parts if part not in ("/", "..") and _kind(Path(part)) is None]
        plain = [part for part in parts if not glob.has_magic(part)]
        return plain[-1] if plain else Path.cwd().name
    name = path.name
    while Path(name).suffix.lower() in (*KINDS, *COMPRESSIONS):
        name = Path(name).stem
    return name


def _split_slice(path: str) -> tuple[str, int | None, int | None]:
    match = _SLICE.fullmatch(path)
    if match is None or _exists(Path(path)):
        return path, None, None
    start, stop = (int(bound) if bound else None for bound in (match["start"], match["stop"]))
    return match["path"], start, stop


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError) as error:
        raise DataError(f"{str(path)[:200]!r}: cannot be read ({error}): give the path of a prompt file") from error


def _find(place: str, split: str | None) -> list[Path]:
    """Return the files that a path means, in order."""
    path = Path(place)
    if not _exists(path) and glob.has_magic(place) and "@[" not in path.name:
        found = sorted(Path(each) for each in glob.glob(place, recursive=True))
        files = [each for each in found if each.is_file()]
        if not files:
            raise DataError(f"{place}: no file has such a name; check the pattern")
        for file in files:
            _check_file(file)
        _refuse_split(place, split, "a pattern")
        return files
    match = _HUB_NAME.fullmatch(place) if not _exists(path) and _kind(path) is None else None
    if match is not None and not Path(match["name"]).parent.exists():
        inside = match["inside"].lstrip("/")
        path = _from_hub(match["name"], inside) / inside
    if path.is_dir():
        return _in_folder(path, split)
    _check_file(path)
    _refuse_split(place, split, "a file")
    return [path]


def _refuse_split(place: str, split: str | None, kind: str) -> None:
    if split is not None:
        raise DataError(
            f"{place}: split = {split!r}: is for folders and data sets of the hub, and this is {kind}: remove it"
        )


def _in_folder(folder: Path, split: str | None) -> list[Path]:
    if (splits := folder / "dataset_dict.json").is_file():
        names = _saved(splits, "splits")
        return _in_folder(folder / _chosen_split(folder, names, split), None)
    if (state := folder / "state.json").is_file():
        _refuse_split(str(folder), split, "one split that was saved alone")
        return [folder / entry["filename"] for entry in _saved(state, "_data_files")]
    inside = [file.relative_to(folder) for file in sorted(folder.rglob("*")) if file.is_file()]
    files = [
        file
        for file in inside
        if _kind(file) and file.name not in _NO_ROWS and not any(part.startswith(".") for part in file.parts)
    ]
    if not files:
        raise DataError(f"{folder}: is a folder without a {_SHOWN_KINDS} file; give the path of one, or of its folder")
    by_split: dict[str, list[Path]] = {}
    for file in files:
        by_split.setdefault(_split_of(file), []).append(file)
    if split is None and "" in by_split and len(by_split) == 2:
        raise DataError(
            f"{folder}: has files of the split {max(by_split)} and others, such as {by_split[''][0]}: set split to it, "
            "or give a pattern of what you want"
        )
    if split is not None or len(by_split) > 1:
        files = by_split[_chosen_split(folder, sorted(filter(None, by_split)), split)]
    _check_alike(folder, files)
    return [folder / file for file in files]


def _saved(path: Path, key: str) -> list[Any]:
    """Return what `datasets` wrote under a key."""
    try:
        return list(json.loads(path.read_text(encoding="utf-8"))[key])
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read, as of a data set that `datasets` saved: {error!r:.200}") from error


def _split_of(file: Path) -> str:
    """Return the split that a file's path names, in our words; an empty text where it names none."""
    words = re.split(r"[^a-z]+", str(file).lower())
    return next((_SPLITS[word] for word in words if word in _SPLITS), "")


def _chosen_split(folder: Path, names: Sequence[str], split: str | None) -> str:
    if split in names:
        return str(split)
    if split is None and len(names) == 1:
        return names[0]
    if split is None:
        raise DataError(f"{folder}: has the splits {', '.join(names)}: set split to one of them")
    raise DataError(f"{folder}: split = {split!r}: no such split; {suggestion(split, names)}")


def _check_alike(folder: Path, files: Sequence[Path]) -> None:
    """Refuse files that do not look like the parts of one data set."""
    folders = sorted({str(file.parent) for file in files})
    if len(folders) > 1:
        raise DataError(
            f"{folder}: has files in several folders, {', '.join(folders[:5])}: give one of these, or take all of them "
            f"with a pattern such as {folder}/**/*{_kind(files[0])}"
        )
    kinds = sorted({str(_kind(file)) for file in files})
    if len(kinds) > 1:
        raise DataError(f"{folder}: has files of several kinds, {', '.join(kinds)}: say which, as {folder}/*{kinds[0]}")


def _from_hub(name: str, inside: str) -> Path:
    """Return the folder of a data set of the hub, of which the files in a folder, or all, are fetched once."""
    try:
        from huggingface_hub import snapshot_download  # slow to import, and needed for such names only

        under = f"{inside}/" if inside else ""
        patterns = [
            f"{under}*{kind}{more}" for kind in KINDS for more in ("", *(COMPRESSIONS if kind in _TEXTS else ()))
        ]
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=patterns))
    except Exception as error:  # every way a download can fail has the same remedy
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        command = f"hf download --repo-type dataset {name} --local-dir data/{name.split('/')[1]}"
        raise DataError(
            f"{name}: no such file or folder, and as a data set of the hub it cannot be fetched ({reason[:200]}): "
            f"fetch it where that goes, with {command}"
        ) from error


def _check_file(path: Path) -> None:
    if not _exists(path):
        raise DataError(f"{path}: no such file; {_missing_file_remedy(path)}")
    if not path.is_file():
        raise DataError(f"{path}: is not a regular file; give the path of a {_SHOWN_KINDS} file")
    if _kind(path) is None:
        packed = path.suffix.lower() in (*COMPRESSIONS, ".xz", ".zip", ".tar", ".tgz")
        remedy = ": unpack it first" if packed else ""
        raise DataError(f"{path}: unknown kind of file {path.suffix!r}; use {_SHOWN_KINDS}{remedy}")


def _missing_file_remedy(path: Path) -> str:
    if "@[" in path.name:
        return "write a slice as file@[start:stop] with whole numbers, for example train.jsonl@[0:100]"
    if not path.parent.is_dir():
        return f"the folder {path.parent} does not exist either"
    siblings = sorted(entry.name for entry in path.parent.iterdir() if _kind(entry))
    return suggestion(path.name, siblings, otherwise="check the path")


def _select(rows: range, start: int | None, stop: int | None, path: Path) -> range:
    if not rows:
        raise DataError(f"{path}: is empty; give a file with at least one row")
    chosen = rows[start:stop]
    if not chosen:
        bounds = ":".join("" if bound is None else str(bound) for bound in (start, stop))
        raise DataError(f"{path}: the slice [{bounds}] selects none of its {len(rows)} rows; choose other bounds")
    return chosen
