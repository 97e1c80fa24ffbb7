"""Groups and the run's state as bytes (msgpack), to be stored and read back.

Layout of version 4: ``[kind, version, checksum, body]``; version 3 is read, too. A record is the list of its fields
(:mod:`rollfeed.types.fields`). Arrays are raw little-endian bytes, 12 a response token and 4 a prompt token; what users
bring (labels, metadata, messages) is JSON text.
Reading builds records and nothing else, so bytes from someone else are safe to open.
"""

from __future__ import annotations

import json
import zlib
from functools import partial
from types import GenericAlias
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from rollfeed.errors import RunDirectoryError, RunFailedError
from rollfeed.store.json_text import of_record, to_json
from rollfeed.types import Correct, Group, LedgerCounts, Rollout, RunState
from rollfeed.types.fields import (
    Convert,
    Kind,
    RecordField,
    cached,
    compiled,
    fields_of,
    from_plain_form,
    from_text,
    is_named_tuple,
    same,
    to_dict,
)
from rollfeed.types.text import well_formed

VERSION = 4
"""Raised when the layout changes; a further field at the end of a record is no change."""
_READABLE = (3, VERSION)
_KINDS: dict[type, str] = {Group: "group", Rollout: "rollout", RunState: "state"}
_OTHER_KINDS = {"draw": "group"}
"""What a group was called that waits to be answered."""

_Record = TypeVar("_Record", Group, Rollout, RunState)


class _Envelope(msgspec.Struct, array_like=True, frozen=True):
    kind: str
    version: int
    checksum: int
    body: bytes


class _Form(NamedTuple):
    """How a value is written."""

    type: Any
    """What msgspec reads it as."""
    pack: Convert
    unpack: Convert


def encode(record: Group | Rollout | RunState) -> bytes:
    """Return a record as bytes; partial and unscored samples included.

    Raises:
        RunFailedError: If a label, metadata, a message or the prompt source's state is not JSON.
    """
    packed = msgspec.msgpack.encode(_form(type(record)).pack(record), enc_hook=_plain_number)
    return msgspec.msgpack.encode(_Envelope(_KINDS[type(record)], VERSION, zlib.crc32(packed), packed))


def decode(record: type[_Record], encoded: bytes) -> _Record:
    """Return the record that :func:`encode` was given.

    Raises:
        RunDirectoryError: If the bytes are damaged, of another kind or of another version.
    """
    kind, form = _KINDS[record], _form(record)
    try:
        envelope = msgspec.msgpack.decode(encoded, type=_Envelope)
        body, stored = envelope.body, _OTHER_KINDS.get(envelope.kind, envelope.kind)
        if stored == kind and envelope.version not in _READABLE:
            raise RunDirectoryError(
                f"stored {kind} has version {envelope.version}, this rollfeed reads {VERSION}: "
                "use the rollfeed that wrote it"
            )
        if stored != kind or envelope.checksum != zlib.crc32(body):
            raise ValueError(f"kind {envelope.kind!r}, or a wrong checksum")
        if envelope.version == 3:
            body = _from_version_3(kind, msgspec.msgpack.decode(body))
        read: _Record = form.unpack(msgspec.msgpack.decode(body, type=form.type))
    except RunDirectoryError:
        raise
    except (msgspec.MsgspecError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise RunDirectoryError(f"stored {kind} is damaged: {error}; restore the run directory from a copy") from error
    return read


def _from_version_3(kind: str, values: list[Any]) -> bytes:
    """Add what version 3 lacks: samples are as right as their verdict says, no ends of the last rollouts are known."""
    groups = [values]
    if kind == "state":
        groups = [group for place in (3, 4, 5) for group in values[place]]
        values[8] = b""
    for _, _, rollouts in groups:
        for _, samples, verdict, *_ in rollouts:
            for sample in samples:
                sample.append(Correct.UNDEFINED if verdict is None else verdict[1])
    return msgspec.msgpack.encode(values)


@cached
def _form(record: type) -> _Form:
    """Return the form of a record: the list of its fields; what has a default may be missing at the end."""
    fields = fields_of(record)
    forms = [_field_form(field) for field in fields]
    wire = msgspec.defstruct(
        record.__name__,
        [
            (field.name, form.type) if field.is_required else (field.name, form.type | msgspec.UnsetType, msgspec.UNSET)
            for field, form in zip(fields, forms, strict=True)
        ],
        array_like=True,
    )
    names = [field.name for field in fields]
    values_of = compiled((name, name, form.pack) for name, form in zip(names, forms, strict=True))
    unpacks = [(name, form.unpack) for name, form in zip(names, forms, strict=True) if form.unpack is not same]

    def pack(value: Any) -> list[Any]:
        try:
            return list(values_of(value).values())
        except RunFailedError as error:
            raise of_record(value, error) from None

    def unpack(value: Any) -> Any:
        values = msgspec.structs.asdict(value)
        if values[names[-1]] is msgspec.UNSET:
            values = {name: each for name, each in values.items() if each is not msgspec.UNSET}
        for name, convert in unpacks:
            if name in values:
                values[name] = convert(values[name])
        return record(**values)

    return _Form(wire, pack, unpack)


def _field_form(field: RecordField) -> _Form:
    if field.type is LedgerCounts:
        return _Form(dict[str, int], to_dict, lambda counts: LedgerCounts(**counts))
    if field.type is bool and field.is_many:
        return _Form(bytes, bytes, lambda flags: tuple(map(bool, flags)))
    kind: Any = field.type
    pack: Convert = same  # where msgspec writes the value itself
    unpack: Convert = same
    match field.kind:
        case Kind.JSON:
            return _Form(str, partial(to_json, what=field.name), _json_value(field))
        case Kind.TEXT:
            kind, pack, unpack = bytes, _utf8, bytes.decode
        case Kind.REWARD:
            kind = float | dict[str, float]
        case Kind.ARRAY:
            stored, native = np.dtype(field.type).newbyteorder("<"), np.dtype(field.type)
            kind, pack = bytes, lambda values: np.ascontiguousarray(values, stored).tobytes()
            unpack = lambda encoded: np.frombuffer(encoded, stored).astype(native)  # noqa: E731
        case Kind.RECORD if not (is_named_tuple(kind) and all(each.kind is Kind.NUMBER for each in fields_of(kind))):
            kind, pack, unpack = _form(kind)
            if (convert := from_text(field.type)) is not None:
                kind, unpack = kind | bytes, partial(_or_text, unpack, convert)
    if field.is_many:
        kind = GenericAlias(tuple, (kind, ...))
    pack = pack if pack is same else field.lifted(pack, list)
    unpack = unpack if unpack is same else field.lifted(unpack)
    return _Form(kind | None if field.is_optional else kind, pack, unpack)


def _or_text(unpack: Convert, convert: Convert, value: Any) -> Any:
    return convert(value.decode()) if isinstance(value, bytes) else unpack(value)


def _plain_number(value: Any) -> Any:
    """Return a number of numpy as one of Python, for msgspec."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{value!r:.80} is no number")


def _json_value(field: RecordField) -> Convert:
    read = from_plain_form(field)
    return json.loads if read is same else lambda text: read(json.loads(text))


def _utf8(text: str) -> bytes:
    return well_formed(text).encode()
