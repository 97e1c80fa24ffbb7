"""The fields of the records, read from the classes, where each stands once: its type, its default and its text.

Whatever writes a record and reads it, as a dictionary (here), as bytes (``store/codec.py``) or as columns
(``store/tables/``), takes its fields from :func:`fields_of`. A new field is a line and its documentation in its class:
the last one, as bytes hold fields by position, and with a default, which it has in what was stored before.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum, auto
from functools import cache, reduce
from operator import attrgetter, or_
from types import NoneType, UnionType
from typing import Annotated, Any, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

_Record = TypeVar("_Record")
_Function = TypeVar("_Function", bound=Callable[..., Any])
Convert: TypeAlias = Callable[..., Any]
"""A conversion of a value."""

SHORT = "short"
VARIES = "varies"
Int32: TypeAlias = Annotated[int, SHORT]
"""A count that fits into 32 bits, and is stored so."""
VaryingInt32: TypeAlias = Annotated[int, SHORT, VARIES]
"""One that differs between two runs of one seed, as durations do; these are stored apart from the rest."""


def cached(function: _Function) -> _Function:
    """Return the function of classes with a cache; ``functools.cache`` alone is typed as if these had no hash."""
    return cache(function)  # type: ignore[return-value]


class Kind(Enum):
    """The ways in which one value of a field is written."""

    NUMBER = auto()
    """A bool, an int or a float."""
    TEXT = auto()
    CHOICE = auto()
    """A member of an enumeration."""
    ARRAY = auto()
    JSON = auto()
    """Any JSON value, which users bring: fields of ``Any`` and of mappings."""
    REWARD = auto()
    """A number, or named numbers."""
    RECORD = auto()
    """A dataclass or a named tuple."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordField:
    """One field of a record."""

    name: str
    kind: Kind
    type: Any
    """Of one value: the class of a number, a choice or a record; the element type of an array."""
    is_many: bool
    """Whether it holds a tuple of such values."""
    is_optional: bool
    """Whether it may be None instead."""
    is_required: bool
    is_short: bool
    """Whether its integers fit into 32 bits."""
    varies: bool
    """Whether it differs between two runs of one seed: what is so is stored apart."""

    def lifted(self, convert: Convert, many: Callable[[Any], Any] = tuple) -> Convert:
        """Return the conversion of what the field holds, from that of one value."""
        whole = convert
        if self.is_many:
            whole = many if convert is same else lambda values: many(map(convert, values))
        if whole is same or not self.is_optional:
            return whole
        return lambda value: None if value is None else whole(value)


def same(value: Any) -> Any:
    """Return the value: the conversion where none is needed, which is not called where that takes long."""
    return value


@cached
def fields_of(record: type) -> tuple[RecordField, ...]:
    """Return the fields of a dataclass or named tuple, in their order.

    Raises:
        TypeError: If one has a type that no format knows.
    """
    hints = get_type_hints(record, include_extras=True)
    if is_dataclass(record):
        hints = {field.name: hints[field.name] for field in fields(record)}
        optional = {f.name for f in fields(record) if f.default is not MISSING or f.default_factory is not MISSING}
    else:
        optional = set(record._field_defaults)  # type: ignore[attr-defined]
    return tuple(_field(name, hint, is_required=name not in optional) for name, hint in hints.items())


def documentation(record: type) -> dict[str, str]:
    """Return what stands below each field of a class."""
    (tree,) = ast.parse(inspect.getsource(record)).body
    assert isinstance(tree, ast.ClassDef)
    texts = {}
    for line, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(line, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            assert isinstance(line.target, ast.Name)
            texts[line.target.id] = " ".join(str(below.value.value).split())
    return texts


@cached
def names_of(record: type) -> frozenset[str]:
    """Return the names of a record's fields."""
    return frozenset(field.name for field in fields_of(record))


def to_dict(record: Any) -> dict[str, Any]:
    """Return a record as a dictionary of JSON values; those that users bring are as they are."""
    written: dict[str, Any] = _to_dict(type(record))(record)
    return written


def from_dict(record: type[_Record], values: Mapping[str, Any]) -> _Record:
    """Rebuild a record from :func:`to_dict`; a field that is not there has its default.

    Raises:
        ValueError: If a required field is missing or a value is of no use.
    """
    if isinstance(values, str) and (convert := from_text(record)) is not None:
        made: _Record = convert(values)
        return made
    required, conversions = _from_dict(record)
    if not required <= values.keys():
        raise ValueError(f"not a {record.__name__.lower()}: missing {sorted(required - values.keys())}")
    read = {**values}
    for name, convert in conversions:
        if name in read:
            read[name] = convert(read[name])
    return record(**read)


def from_text(record: type) -> Callable[[str], Any] | None:
    """Return what makes a record of the text that it was before it had fields; None for those that never were one."""
    return getattr(record, "from_text", None)


def is_named_tuple(record: type) -> bool:
    """Whether a record is a named tuple, which is written as a list of its values where there are no columns."""
    return issubclass(record, tuple)


def _field(name: str, hint: Any, *, is_required: bool) -> RecordField:
    marks: tuple[Any, ...] = ()
    is_optional = is_many = False
    inner = hint
    while True:
        origin, args = get_origin(inner), get_args(inner)
        if origin is Annotated:
            inner, marks = args[0], (*marks, *args[1:])
        elif origin in (Union, UnionType) and NoneType in args:
            inner, is_optional = reduce(or_, (each for each in args if each is not NoneType)), True
        elif origin in (tuple, Sequence) and not is_many:
            inner, is_many = args[0], True
        elif hasattr(origin, "__value__"):  # a named type with its arguments, as NDArray is from numpy 2.5 on
            inner = origin.__value__[args]
        else:
            break
    kind, of = _kind(inner, origin, args)
    if kind is None:
        raise TypeError(f"{name}: {hint}: values of this type cannot be stored")
    return RecordField(
        name=name,
        kind=kind,
        type=of,
        is_many=is_many,
        is_optional=is_optional,
        is_required=is_required,
        is_short=SHORT in marks,
        varies=VARIES in marks or name.endswith("seconds"),
    )


def _kind(hint: Any, origin: Any, args: tuple[Any, ...]) -> tuple[Kind | None, Any]:
    if hint is Any or origin is Mapping:
        return Kind.JSON, None
    if origin is np.ndarray:
        return Kind.ARRAY, get_args(args[1])[0]
    if origin in (Union, UnionType):
        return (Kind.REWARD if args == (float, dict[str, float]) else None), None
    if hint in (bool, int, float):
        return Kind.NUMBER, hint
    if issubclass(hint, Enum):
        return Kind.CHOICE, hint
    if hint is str:
        return Kind.TEXT, hint
    return (Kind.RECORD if is_dataclass(hint) or is_named_tuple(hint) else None), hint


def plain_form(field: RecordField) -> Convert:
    """Return the conversion of what a field holds to JSON values."""
    match field.kind:
        case Kind.NUMBER:
            return field.lifted(field.type, list)
        case Kind.CHOICE:
            return field.lifted(attrgetter("value"), list)
        case Kind.REWARD:
            return field.lifted(_plain_reward, list)
        case Kind.ARRAY:
            return field.lifted(np.ndarray.tolist, list)
        case Kind.JSON:
            return field.lifted(lambda value: dict(value) if isinstance(value, Mapping) else value, list)
        case Kind.RECORD:
            return field.lifted(list if is_named_tuple(field.type) else to_dict, list)
    return field.lifted(same, list)


def _plain_reward(reward: Any) -> float | dict[str, float]:
    return {name: float(value) for name, value in reward.items()} if isinstance(reward, dict) else float(reward)


def from_plain_form(field: RecordField) -> Convert:
    """Return the conversion of JSON values to what a field holds."""
    match field.kind:
        case Kind.CHOICE:
            return field.lifted(field.type)
        case Kind.ARRAY:
            return field.lifted(lambda values: np.asarray(values, field.type))
        case Kind.RECORD if is_named_tuple(field.type):
            return field.lifted(lambda values: field.type(*values))
        case Kind.RECORD:
            return field.lifted(lambda values: from_dict(field.type, values))
    return field.lifted(same)


def compiled(entries: Iterable[tuple[str, str, Convert]]) -> Convert:
    """Return what makes a dictionary of a record, given each key, the attribute that it is of and its conversion.

    As source, as dataclasses make their methods: it is on the way of every sample, and a loop takes twice as long.
    """
    known, items = {}, []
    for place, (key, attribute, convert) in enumerate(entries):
        known[f"c{place}"] = convert
        items.append(f"{key!r}: {'' if convert is same else f'c{place}'}(record.{attribute})")
    function: Convert = eval(f"lambda record: {{{', '.join(items)}}}", known)
    return function


@cached
def _to_dict(record: type) -> Convert:
    return compiled((field.name, field.name, plain_form(field)) for field in fields_of(record))


@cached
def _from_dict(record: type) -> tuple[frozenset[str], list[tuple[str, Convert]]]:
    """Return which fields are required, and the conversions that do something."""
    known = fields_of(record)
    conversions = [(field.name, from_plain_form(field)) for field in known]
    required = frozenset(field.name for field in known if field.is_required)
    return required, [each for each in conversions if each[1] is not same]
