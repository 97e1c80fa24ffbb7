"""The file of a delta: from one checkpoint folder to the next one, byte for byte.

Every file of a folder is *pieces*: a safetensors file its header and its tensors, any other file one. A delta holds the
pieces whose bytes changed, each with a checksum, and the digest of the folder that comes out. It begins with a mark,
then come the encoded pieces, a table of them (msgpack, zstd), its length before and after zstd, and a checksum of all.

A folder is known by its *digest*: what all its pieces are. Two that are called the same version are told apart so.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np

from rollfeed.base.atomic import open_regular, temporary_path
from rollfeed.base.cores import num_physical_cores
from rollfeed.weights.transports.delta.encoding import (
    UNREADABLE,
    Bytes,
    DamagedError,
    decode,
    element_bytes,
    encode,
    unzipped,
    zipped,
)

_MARK = b"RFDELTA1"
_CHECKSUM_BYTES = 16
_MOST_TABLE_BYTES, _WIDTHS = 1 << 28, (1, 2, 4, 8)
_END_BYTES = 16 + 32
_MOST_THREADS = 8
_READ_BYTES = 1 << 20

PieceKey: TypeAlias = tuple[str, str]
"""Of a piece: its file, relative to the folder, and the tensor's name, or nothing."""
Sums: TypeAlias = dict[PieceKey, bytes]
One = TypeVar("One")
Other = TypeVar("Other")


class PieceSpan(NamedTuple):
    """The bytes of a piece in its file, and of how many an element is."""

    begin: int
    end: int
    width: int


class PieceChange(msgspec.Struct, frozen=True, array_like=True):
    """New bytes of a piece, and where the delta has them."""

    key: PieceKey
    span: PieceSpan
    at: int
    size: int
    checksum: bytes


class DeltaTable(msgspec.Struct, frozen=True):
    """All that a delta tells beside the pieces themselves."""

    policy_version: int
    digest: str
    base: str | None
    """Digest of the folder that it changes; None where it needs none."""
    copied: dict[str, int]
    """Files that begin as the base's, and how long they are."""
    new: dict[str, int]
    """The other files."""
    changes: list[PieceChange]


class CheckpointPieces:
    """A checkpoint folder, which may not change meanwhile.

    Raises:
        DamagedError: If a safetensors file is none.
        OSError: If it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        paths = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
        self.sizes = {file: path.stat().st_size for file, path in paths.items()}
        self.spans = {(file, name): span for file, path in paths.items() for name, span in _spans(path).items()}
        self._mapped = cache(lambda file: np.asarray(np.memmap(folder / file, np.uint8, mode="r")))

    def read(self, key: PieceKey) -> Bytes:
        """Return the bytes of a piece, as they are on the disk."""
        begin, end, _ = self.spans[key]
        content: Bytes = self._mapped(key[0])[begin:end] if begin < end else np.zeros(0, np.uint8)
        return content

    def sums(self) -> Sums:
        """Read everything and return its checksums."""
        return dict(in_threads(lambda key: checksum_of(self.read(key)), self.spans))


def checksum_of(content: Bytes) -> bytes:
    """Return 16 bytes of the content's SHA-256."""
    return hashlib.sha256(content.data).digest()[:_CHECKSUM_BYTES]


def digest_of(sums: Mapping[PieceKey, bytes]) -> str:
    """Return what a folder is known by, 32 hexadecimal digits."""
    return checksum_of(np.frombuffer(msgspec.msgpack.encode(sorted(sums.items())), np.uint8)).hex()


def write_delta(
    path: Path, new: CheckpointPieces, *, policy_version: int, old: CheckpointPieces | None = None, old_sums: Sums
) -> Sums:
    """Write the delta from ``old`` to ``new``, or all of ``new``, and return the checksums of ``new``.

    Raises:
        OSError: If it cannot be written; nothing is left then.
    """
    copied = {file for file in new.sizes if old is not None and _spans_of(old, file) == _spans_of(new, file)}

    def change(key: PieceKey) -> tuple[bytes, bytes | None]:
        now, was = new.read(key), old.read(key) if old is not None and key[0] in copied else None
        if was is not None and np.array_equal(was, now):
            return b"", None
        return encode(was, now, width=new.spans[key].width), checksum_of(now)

    sums, changes, at = {key: old_sums[key] for key in new.spans if key[0] in copied}, [], len(_MARK)
    temporary = temporary_path(path)
    try:
        with temporary.open("wb") as output:
            output.write(_MARK)
            for key, (content, checksum) in in_threads(change, new.spans):
                if checksum is not None:
                    sums[key] = checksum
                    changes.append(PieceChange(key, new.spans[key], at, len(content), checksum))
                    at += output.write(content)
            table = DeltaTable(
                policy_version,
                digest_of(sums),
                digest_of(old_sums) if copied else None,
                {file: size for file, size in new.sizes.items() if file in copied},
                {file: size for file, size in new.sizes.items() if file not in copied},
                changes,
            )
            told = msgspec.msgpack.encode(table)
            packed = zipped(told)
            output.write(packed + len(told).to_bytes(8, "little") + len(packed).to_bytes(8, "little"))
        with temporary.open("rb+") as written:
            written.write(_file_checksum(written, written.seek(0, os.SEEK_END)))
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return sums


def read_delta(path: Path) -> DeltaTable:
    """Return the table of a delta whose checksum is right.

    Raises:
        DamagedError: If it is cut short, or not what was written.
        OSError: If it cannot be read, or is no regular file.
    """
    with open_regular(path) as file:
        size = os.path.getsize(path)
        if size < len(_MARK) + _END_BYTES or file.read(len(_MARK)) != _MARK:
            raise DamagedError("it is cut short or no delta")
        if _file_checksum(file, size - 32) != file.read():
            raise DamagedError("its checksum is wrong")
        file.seek(size - _END_BYTES)
        length, packed = (int.from_bytes(file.read(8), "little") for _ in range(2))
        if packed > size or length > _MOST_TABLE_BYTES:
            raise DamagedError("its table is larger than itself")
        file.seek(max(0, size - _END_BYTES - packed))
        try:
            table = msgspec.msgpack.decode(unzipped(file.read(packed), length), type=DeltaTable)
        except UNREADABLE as error:
            raise DamagedError(f"its table is of another form: {error}") from error
    for each in map(PurePosixPath, [*table.copied, *table.new]):
        if each.is_absolute() or ".." in each.parts:
            raise DamagedError(f"it names the file {str(each)!r}, which is not inside its folder")
    sizes = {**table.copied, **table.new}
    for change in table.changes:
        begin, end, width = change.span
        is_inside = 0 <= begin <= end <= sizes.get(change.key[0], -1) and width in _WIDTHS
        if not (is_inside and change.at >= 0 and 0 <= change.size <= size - change.at):
            raise DamagedError(f"its piece {' '.join(change.key)!r:.80} lies outside")
    return table


def apply_delta(path: Path, table: DeltaTable, base: CheckpointPieces | None, folder: Path) -> Sums:
    """Fill an empty folder with what comes out, compare all of it with the digest, and return its checksums.

    Raises:
        DamagedError: If something else comes out; the message names the first piece.
        OSError: If it cannot be read or written.
    """
    for file, size in {**table.copied, **table.new}.items():
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        if file in table.copied and base is not None:
            shutil.copyfile(base.folder / file, target)
        with target.open("ab") as output:
            output.truncate(size)

    def rebuild(change: PieceChange) -> None:
        file, (begin, end, width) = change.key[0], change.span
        is_known = base is not None and file in table.copied and base.spans.get(change.key) == change.span
        old = base.read(change.key) if base is not None and is_known else None
        with path.open("rb") as source, (folder / file).open("rb+") as output:
            source.seek(change.at)
            content = decode(source.read(change.size), old, num_bytes=end - begin, width=width)
            output.seek(begin)
            output.write(content.data)

    for _ in in_threads(rebuild, table.changes):
        pass
    sums = CheckpointPieces(folder).sums()
    if digest_of(sums) != table.digest:
        wrong = [" ".join(each.key) for each in table.changes if sums.get(each.key) != each.checksum]
        raise DamagedError(f"{wrong[0] if wrong else 'what did not change'} is not what was published")
    return sums


def in_threads(do: Callable[[One], Other], each: Iterable[One]) -> Iterator[tuple[One, Other]]:
    """Return what a function makes of each, in their order; several are at work at once."""
    chosen = list(each)
    with ThreadPoolExecutor(min(_MOST_THREADS, num_physical_cores())) as threads:
        yield from zip(chosen, threads.map(do, chosen), strict=True)


def _spans_of(pieces: CheckpointPieces, file: str) -> dict[PieceKey, PieceSpan]:
    return {key: span for key, span in pieces.spans.items() if key[0] == file}


def _spans(path: Path) -> dict[str, PieceSpan]:
    size = path.stat().st_size
    if path.suffix != ".safetensors":
        return {"": PieceSpan(0, size, 1)}
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(start - 8) if start <= size else b"")
            tensors = {name: value for name, value in header.items() if name != "__metadata__"}
            spans = {name: (*value["data_offsets"], element_bytes(value["dtype"])) for name, value in tensors.items()}
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
            raise DamagedError(f"{path}: its header is not that of a safetensors file") from None
    told = {name: PieceSpan(start + begin, start + end, width) for name, (begin, end, width) in spans.items()}
    return {"": PieceSpan(0, start, 1), **told}


def _file_checksum(file: IO[bytes], length: int) -> bytes:
    """Return the SHA-256 of a file's first bytes, and leave it behind them."""
    file.seek(0)
    digest = hashlib.sha256()
    while chunk := file.read(min(_READ_BYTES, length)):
        digest.update(chunk)
        length -= len(chunk)
    return digest.digest()
