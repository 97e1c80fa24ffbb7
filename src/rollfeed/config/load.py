"""From a TOML file and command-line overrides to the settings tree, or to an error that names the mistake."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rollfeed.config.reward import ScoringSettings
from rollfeed.config.section import Section, section_in
from rollfeed.config.settings import Settings, flatten
from rollfeed.errors import ConfigError, suggestion

S = TypeVar("S", bound=Section)


def chosen_keys(tree: Mapping[str, Any], overrides: Sequence[str], settings: Settings) -> frozenset[str]:
    """Return the keys that overrides decide: those that they name, and those whose values follow from them.

    ``tree`` are settings as they are without them, ``settings`` what came of both.
    """
    chosen = flatten(settings.model_dump(mode="json"))
    try:
        plain = flatten(_validated(Settings, tree, "").model_dump(mode="json"))
    except ConfigError:  # a file that needs its overrides
        plain = chosen
    return frozenset(key for key, value in chosen.items() if plain.get(key) != value or is_named(key, overrides))


def is_named(key: str, overrides: Iterable[str]) -> bool:
    """Return whether one of ``key=value`` sets a key, a table that it is in, or an entry of its list."""
    names = [override.partition("=")[0].replace(" ", "") for override in overrides]
    return any(f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.") for name in names)


def load_scoring_settings(path: Path) -> ScoringSettings:
    """Read what says how responses are scored from a settings file, in which all else may be missing.

    Raises:
        ConfigError: As :func:`validate_settings`; other tables are not looked into.
    """
    tree = read_toml(path)
    unknown = [name for name in tree if name not in Settings.model_fields]
    if unknown:
        lines = [f"{path}: {name}: unknown setting; {suggestion(name, Settings.model_fields)}" for name in unknown]
        raise ConfigError("\n".join(lines))
    wanted = {name: table for name, table in tree.items() if name in ScoringSettings.model_fields}
    return _validated(ScoringSettings, wanted, str(path))


def read_label_names(path: Path) -> frozenset[str]:
    """Return the columns of labels that a settings file names, whatever else is in it."""
    tables, found = [], set()
    for section in map(read_toml(path).get, ("prompts", "eval")):
        if isinstance(section, dict):
            datasets = section.get("datasets")
            tables += [section, *(datasets if isinstance(datasets, list) else [])]
    for table in tables:
        if isinstance(table, dict) and isinstance(name := table.get("label_key"), str):
            found.add(name)
    return frozenset(found)


def validate_settings(tree: Mapping[str, Any], *, where: str, overrides: Sequence[str] = ()) -> Settings:
    """Build the settings from nested dictionaries and ``key=value`` overrides; ``where`` names their origin in errors.

    Raises:
        ConfigError: If a setting is unknown, of the wrong type, out of bounds or does not fit the others; one line a
            mistake.
    """
    changed = deepcopy(dict(tree))
    for override in overrides:
        _apply_override(changed, override)
    return _validated(Settings, changed, where)


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of two settings files as one: values of the later win, tables are merged, lists replaced."""
    tree = dict(below)
    for name, value in above.items():
        earlier = tree.get(name)
        tree[name] = merged(earlier, value) if isinstance(earlier, Mapping) and isinstance(value, Mapping) else value
    return tree


def _validated(root: type[S], tree: Mapping[str, Any], where: str) -> S:
    try:
        return root.model_validate(tree)
    except ValidationError as error:
        lines = [f"{where}: {describe(details, root)}" for details in error.errors()]
        raise ConfigError("\n".join(lines)) from None


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a settings file. Raises ConfigError if it cannot be read, or is not TOML."""
    tables: dict[str, Any] = _read(path, tomllib.loads)
    return tables


def read_json(path: Path) -> dict[str, Any]:
    """Return the settings in a run's ``settings.json``. Raises ConfigError if it cannot be read, or has none."""
    tree = _read(path, json.loads)
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: holds no settings, which are one JSON object; give the settings.json of a run")
    return tree


def _read(path: Path, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such settings file; give the path of a .toml file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder; give the path of a .toml file") from None
    except UnicodeDecodeError as error:
        remedy = "save it as UTF-8" if error.object[:2] in (b"\xff\xfe", b"\xfe\xff") else "is it a TOML file?"
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); {remedy}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: its values are nested too deeply") from None


def _apply_override(tree: dict[str, Any], override: str) -> None:
    """Set ``a.b.c=value`` in ``tree``; the value is TOML, or text when it is not TOML. Without one, ``c`` is unset."""
    key, equals, text = override.partition("=")
    names = [name.strip() for name in key.split(".")]
    if not equals or not all(names):
        raise ConfigError(f"--set {override!r}: write it as section.key=value, for example rollout.num_rollout=3")
    table: Any = tree
    for name in names[:-1]:
        table = _step_into(table, name, override)
    if isinstance(table, list):
        _step_into(table, names[-1], override)
        table[int(names[-1])] = _parse_value(text)
    elif not text.strip():
        table.pop(names[-1], None)
    else:
        table[names[-1]] = _parse_value(text)


def _step_into(table: Any, name: str, override: str) -> Any:
    if isinstance(table, list):
        if not name.isdigit() or int(name) >= len(table):
            raise ConfigError(f"--set {override!r}: {name!r} is not one of the {len(table)} entries (counted from 0)")
        return table[int(name)]
    if isinstance(table, dict) and table.get(name) is None:
        table[name] = {}
    if not isinstance(table, dict) or not isinstance(table[name], dict | list):
        raise ConfigError(f"--set {override!r}: {name!r} is not a table")
    return table[name]


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


def describe(details: ErrorDetails, root: type[Section]) -> str:
    """Return one line for one validation error: key, what is wrong, what to do."""
    key = ".".join(str(part) for part in details["loc"])
    kind, given = details["type"], details["input"]
    if kind == "extra_forbidden":
        return f"{key}: unknown setting; {_meant(root, details['loc'])}"
    if kind == "missing":
        return f"{key}: is required; add it"
    message = details["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        return f"{key}: {message}" if key else message
    message = (message[0].lower() + message[1:]).replace("a valid tuple", "a list")
    shown = repr(given) if not isinstance(given, dict | list) else f"a {'table' if isinstance(given, dict) else 'list'}"
    return f"{key} = {shown}: {message}"


def _meant(root: type[Section], location: Sequence[str | int]) -> str:
    """Return what to tell who wrote an unknown key: the keys of all tables with its name, or one that is like it."""
    name, here = str(location[-1]), _fields_at(root, location[:-1])
    keys = list(keys_of(root))
    is_typo = bool(difflib.get_close_matches(name, here, n=1, cutoff=0.8))
    found = [key for key in keys if f".{key}".endswith(f".{name}" if is_typo else (f".{name}", f"_{name}"))]
    near = difflib.get_close_matches(name, {*here, *(key.rpartition(".")[2] for key in keys)}, n=1, cutoff=0.8)
    if not found and near and near[0] not in here:
        found = [key for key in keys if key.endswith(f".{near[0]}")]
    return f"did you mean {' or '.join(found)}?" if 0 < len(found) <= 4 else suggestion(name, here)


def keys_of(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a section and the tables in it, without those of entries of lists."""
    for name, info in section.model_fields.items():
        inner = section_in(info.annotation)
        if inner is None:
            yield f"{prefix}{name}"
        elif get_origin(info.annotation) not in (tuple, dict):
            yield from keys_of(inner, f"{prefix}{name}.")


def _fields_at(root: type[Section], location: Sequence[str | int]) -> list[str]:
    model: type[Section] | None = root
    for part in location:
        if isinstance(part, str) and model is not None and part in model.model_fields:
            model = section_in(model.model_fields[part].annotation)
    return sorted(model.model_fields) if model is not None else []
