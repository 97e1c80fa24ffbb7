"""docs/settings.md, generated from the classes."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, TypeGuard, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rollfeed.config.section import Resume, Section, section_in
from rollfeed.config.settings import Settings
from rollfeed.types.fields import documentation

_HEAD = """# Settings

A settings file is TOML: the key `seed`, and the tables below. Every key can be overridden on the command line with
`--set table.key=value` (list entries by number: `--set prompts.environments.0.level=2`). Unknown keys are refused.
Commands take several files, `rollfeed run base.toml large.toml`: values of later ones win, tables are merged and lists
replaced. The `settings.json` of a run is such a file, too. `rollfeed check FILE --print` shows what comes of it.
An unfinished run in the same folder is gone on with; which settings may be others then stands
[below](#going-on-with-a-run).

This page is generated from the classes: `python docs/pages/settings.py > docs/settings.md`.
"""
_GOING_ON = """## Going on with a run

What was changed, from which step on, and what it was before is kept in the run: `rollfeed show` has it. Settings that
may be others on purpose are taken from `--set`, and refused where only the file has them otherwise. `.*` stands for all
below that is not named elsewhere.

| may be another | settings |
|---|---|"""
_RESUME = {
    Resume.FREE: "yes",
    Resume.FREE_UNLESS_DETERMINISTIC: "yes, unless `rollout.deterministic` is on: it changes the rounding of answers",
    Resume.ON_PURPOSE: "on purpose, with `--set`",
}
_ORDER = (
    *("seed", "model", "prompts", "rollout", "buffer", "placement", "sampling", "engine", "weights", "reward"),
    *("filters", "advantage", "teacher", "train"),
)
"""The tables that come first; the others follow as they are declared."""


def render_reference() -> str:
    """Return the whole settings reference as Markdown."""
    parts = [_HEAD, _table("Root", Settings, "", sections=False)]
    for name in sorted(Settings.model_fields, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER)):
        section = section_in(Settings.model_fields[name].annotation)
        if section is not None:
            parts.append(_table(f"`[{name}]`", section, f"{name}."))
            parts += _inner_tables(name, section)
    return "\n".join([*parts, _going_on()])


def _going_on() -> str:
    """Return which settings may be others when a run is resumed."""
    placed = list(_placed(Settings))
    rows = ((_RESUME.get(kind, f"no: it {kind.value}"), [key for key, own in placed if own is kind]) for kind in Resume)
    lines = [f"| {what} | {', '.join(f'`{key}`' for key in keys)} |" for what, keys in rows]
    return "\n".join([_GOING_ON, *lines]) + "\n"


def _placed(section: type[Section], prefix: str = "") -> Iterator[tuple[str, Resume]]:
    """Yield what keys may be, for those that say it and as ``.*`` for sections that do."""
    if section.resume is not None:
        yield f"{prefix}*", section.resume
    for name, info in section.model_fields.items():
        yield from ((f"{prefix}{name}", each) for each in info.metadata if isinstance(each, Resume))
        for inner, is_list in _inner_sections(info):
            if not is_list:
                yield from _placed(inner, f"{prefix}{name}.")


def _inner_tables(name: str, section: type[Section]) -> list[str]:
    return [
        _table(f"`[[{name}.{key}]]`" if is_list else f"`[{name}.{key}]`", inner, f"{name}.{key}.")
        for key, info in section.model_fields.items()
        for inner, is_list in _inner_sections(info)
    ]


def _inner_sections(info: FieldInfo) -> list[tuple[type[Section], bool]]:
    """Return the section that a field is, may be or has a list of, and whether it is a list; not tables by name."""
    origin = get_origin(info.annotation)
    inside = () if origin is dict else get_args(info.annotation)
    return [(inner, origin is tuple) for inner in (info.annotation, *inside) if _is_section(inner)]


def _is_section(annotation: Any) -> TypeGuard[type[Section]]:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _table(title: str, section: type[Section], prefix: str, *, sections: bool = True) -> str:
    lines = [
        f"## {title}",
        "",
        (section.__doc__ or "").strip(),
        "",
        "| key | type | default | meaning |",
        "|---|---|---|---|",
    ]
    meanings = descriptions(section)
    for name, info in section.model_fields.items():
        if not sections and section_in(info.annotation):
            continue
        meaning = meanings.get(name, "").replace("|", "\\|")
        lines.append(f"| `{prefix}{name}` | {_type(info)} | {_default(info)} | {meaning} |")
    return "\n".join(lines) + "\n"


def descriptions(section: type[Section]) -> dict[str, str]:
    """Return what stands below each key of a section, and of those that it is derived from."""
    derived = [each for each in reversed(section.__mro__) if issubclass(each, Section)]
    return {name: text for each in derived for name, text in documentation(each).items()}


def _type(info: FieldInfo) -> str:
    bounds = [text for constraint in info.metadata for text in _bounds(constraint)]
    return " ".join([_type_name(info.annotation), *bounds]).replace("|", "\\|")


def _bounds(constraint: Any) -> list[str]:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    return [f"{sign} {getattr(constraint, name):g}" for name, sign in signs.items() if hasattr(constraint, name)]


def _type_name(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _type_name(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return " or ".join(_type_name(inner) for inner in get_args(annotation) if inner is not NoneType)
    if origin is tuple:
        inner = get_args(annotation)[0]
        return "tables" if _is_section(inner) else f"list of {_type_name(inner)}"
    if _is_section(annotation) or origin is dict:
        return "table"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " or ".join(f'"{member.value}"' for member in annotation)
    return {str: "text", int: "integer", float: "number", bool: "true/false"}.get(annotation, str(annotation))


def _default(info: FieldInfo) -> str:
    if info.default is PydanticUndefined:
        return "required"
    if info.default is None or info.default in ((), {}):
        return "none"
    if isinstance(info.default, Section):
        return "its defaults"
    if isinstance(info.default, bool):
        return f"`{str(info.default).lower()}`"
    return f'`"{info.default}"`' if isinstance(info.default, str) else f"`{info.default}`"


if __name__ == "__main__":
    print(render_reference(), end="")
