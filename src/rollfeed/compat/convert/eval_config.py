"""slime's file of evaluation sets (``--eval-config``), as ``[eval]``."""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from rollfeed.compat.convert.toml_text import Setting
from rollfeed.errors import ConfigError, suggestion

KEYS: Mapping[str, str] = MappingProxyType(
    {
        "name": "name",
        "path": "path",
        "rm_type": "rm_type",
        "input_key": "input_key",
        "prompt_key": "input_key",
        "label_key": "label_key",
        "tool_key": "tools_key",
        "metadata_key": "metadata_key",
        "multimodal_keys": "image_key",
        "apply_chat_template": "apply_chat_template",
        "n_samples_per_eval_prompt": "n_samples_per_prompt",
        "temperature": "temperature",
        "top_p": "top_p",
        "top_k": "top_k",
        "max_response_len": "max_response_len",
        "max_prompt_len": "max_prompt_len",
        "max_context_len": "max_context_len",
        "min_new_tokens": "min_new_tokens",
        "repetition_penalty": "repetition_penalty",
        "stop": "stop",
        "stop_token_ids": "stop_token_ids",
        "skip_special_tokens": "skip_special_tokens",
    }
)
"""Keys of a set, or of ``defaults``, and what they are in ``[[eval.datasets]]``."""
LEFT: Mapping[str, str] = MappingProxyType(
    {
        "custom_rm_path": "a set names a grader (rm_type); name a function in [reward.functions], and in the rows' "
        "metadata as reward_fn",
        "custom_generate_function_path": "plugins.generate answers all sets; it is told by request.evaluation",
        "apply_chat_template_kwargs": "model.chat_template_kwargs holds for all sets",
        "metadata_overrides": "metadata is that of the rows; rm_type of a set is carried over",
        "no_stop_trim": "a stop string stays in the response anyway",
        "app_service": "nothing in slime reads it",
        "eval_task_timeout": "nothing in slime reads it",
        "min_eval_samples": "nothing in slime reads it",
        "eval_early_stop_remaining": "nothing in slime reads it",
        "eval_early_stop_idle_timeout": "nothing in slime reads it",
        "message_processor": "nothing in slime reads it",
        "reward_model": "nothing in slime reads it",
        "remote_environment": "nothing in slime reads it",
    }
)
"""Keys that slime knows and that have no counterpart, and why."""
_SAMPLE_ONLY = frozenset({"name", "path"})
_ENVIRONMENT = re.compile(r"\$\{oc\.env:(\w+)(?:,\s*([^}]*))?\}")


@dataclass(slots=True)
class EvalConfig:
    """The sets of a file."""

    defaults: dict[str, Setting] = field(default_factory=dict)
    """Keys of ``[eval]``."""
    datasets: list[dict[str, Setting]] = field(default_factory=list)
    """Keys of each ``[[eval.datasets]]``; ``defaults`` are not in them."""
    left: list[tuple[str, str]] = field(default_factory=list)
    """Keys with their lines that are not carried over, and why."""


def read_eval_config(given: str, *, folder: Path | None = None) -> EvalConfig:
    """Read a YAML or JSON file of evaluation sets, or ``base64:`` and its content.

    Raises:
        ConfigError: If it cannot be read, has a key that slime does not know, or no sets; with file and line.
    """
    root, source = compose_file(given, "--eval-config", folder=folder)
    top = table_of(root, source)
    if "eval" in top:
        _known(top, ("eval",), source, "the file")
        top = table_of(top["eval"][1], source)
    _known(top, ("defaults", "datasets"), source, "eval")
    found = EvalConfig()
    if "defaults" in top:
        found.defaults = dict(_keys(table_of(top["defaults"][1], source), source, found, skip=_SAMPLE_ONLY))
    for name, node in _sets(top["datasets"][1] if "datasets" in top else root, source, has_sets="datasets" in top):
        table = table_of(node, source)
        named = {"name": Setting(name, _place(node, source))} if name else {}
        dataset = named | dict(_keys(table, source, found))
        for key in _SAMPLE_ONLY - dataset.keys():
            raise ConfigError(f"{_place(node, source)}: the set has no {key}: add it")
        found.datasets.append(dataset)
    if not found.datasets:
        raise ConfigError(f"{source}: there are no sets in eval.datasets: add one with name and path")
    return found


def compose_file(given: str, flag: str, *, folder: Path | None) -> tuple[yaml.Node, str]:
    """Return the nodes of a YAML file, which know their lines, and how the file is called in errors.

    Raises:
        ConfigError: If it cannot be read or is not YAML.
    """
    source = given
    if given.startswith("base64:"):
        source = flag
        try:
            text = base64.b64decode(given.removeprefix("base64:"), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            raise ConfigError(f"{flag}: what follows base64: is none; give the path of a YAML file") from None
    else:
        path = Path(os.path.expandvars(os.path.expanduser(given)))
        if folder is not None and not path.exists():
            path = folder / path
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            problem = getattr(error, "strerror", None) or "not UTF-8 text"
            raise ConfigError(f"{flag} {given}: cannot be read ({problem}); give the path of a YAML file") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{source}{line}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if node is None:
        raise ConfigError(f"{source}: is empty: write its settings, or leave {flag} out")
    return node, source


def plain_value(node: yaml.Node) -> Any:
    """Return what a node holds; numbers as 1e-6, which YAML 1.1 reads as text, are numbers."""
    value = yaml.SafeLoader("").construct_object(node, deep=True)
    if isinstance(value, str) and isinstance(node, yaml.ScalarNode) and node.style is None:
        value = _ENVIRONMENT.sub(lambda name: os.environ.get(name[1], name[2] or ""), value)
        if re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
            return float(value)
    return value


def table_of(node: yaml.Node, source: str) -> dict[str, tuple[yaml.Node, yaml.Node]]:
    """Return the keys of a mapping with the nodes of key and value.

    Raises:
        ConfigError: If it is none, or has a key twice.
    """
    if isinstance(node, yaml.ScalarNode) and plain_value(node) is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{_place(node, source)}: must be a mapping of keys to values")
    yaml.SafeLoader("").flatten_mapping(node)  # `<<` and what it merges
    found: dict[str, tuple[yaml.Node, yaml.Node]] = {}
    for key, value in node.value:
        name = str(plain_value(key))
        if name in found:
            raise ConfigError(f"{_place(key, source)}: {name} is there twice: remove one")
        found[name] = (key, value)
    return found


def _place(node: yaml.Node, source: str) -> str:
    return f"{source}:{node.start_mark.line + 1}"


def _known(table: Mapping[str, tuple[yaml.Node, yaml.Node]], known: tuple[str, ...], source: str, where: str) -> None:
    for name, (key, _) in table.items():
        if name not in known:
            raise ConfigError(f"{_place(key, source)}: {name}: unknown key in {where}; {suggestion(name, known)}")


def _sets(node: yaml.Node, source: str, *, has_sets: bool) -> Iterator[tuple[str, yaml.Node]]:
    """Yield the sets of a list, or of a mapping by their names."""
    if not has_sets or (isinstance(node, yaml.ScalarNode) and plain_value(node) is None):
        return
    if isinstance(node, yaml.SequenceNode):
        yield from (("", each) for each in node.value)
    else:
        yield from ((name, value) for name, (_, value) in table_of(node, source).items())


def _keys(
    table: Mapping[str, tuple[yaml.Node, yaml.Node]],
    source: str,
    found: EvalConfig,
    *,
    skip: frozenset[str] = frozenset(),
) -> Iterator[tuple[str, Setting]]:
    known = [key for key in (*KEYS, *LEFT) if key not in skip]
    for name, (key, node) in table.items():
        if name not in known:
            raise ConfigError(f"{_place(key, source)}: {name}: unknown key of a set; {suggestion(name, known)}")
        value = plain_value(node)
        if name in LEFT:
            found.left.append((f"{_place(key, source)}: {name}", LEFT[name]))
        elif name == "multimodal_keys":
            if value is not None and not isinstance(value, dict):
                raise ConfigError(f"{_place(key, source)}: multimodal_keys must be a mapping such as {{image: images}}")
            for kind, column in (value or {}).items():
                if kind in ("image", "video"):
                    yield f"{kind}_key", Setting(column, _place(key, source))
                else:
                    found.left.append((f"{_place(key, source)}: {name}", "images and videos only"))
        elif value is not None:
            is_listed = name in ("stop", "stop_token_ids") and not isinstance(value, list)
            yield KEYS[name], Setting([value] if is_listed else value, f"{_place(key, source)}: {name}")
