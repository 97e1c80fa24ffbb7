"""Checks of a slime plug-in before anything starts: its signature, its imports, what it reads of args."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollfeed.base.importing import is_async
from rollfeed.compat.slime_plugins.slime_args import SlimeArguments, missing
from rollfeed.compat.slime_plugins.supplied import PACKAGES, SUPPLIED, is_known, names_of
from rollfeed.errors import PluginError


def check_call(
    function: Any, parameters: Sequence[str], *, key: str, allows_async: bool = False, is_of_miles: bool = False
) -> None:
    """Check that a function takes what slime calls it with.

    Raises:
        PluginError: If it does not, or is async where slime's are not.
    """
    if not callable(function):
        raise PluginError(f"{key}: is a {type(function).__name__}, not a function")
    try:
        signature = inspect.signature(function)
        required = [each for each in signature.parameters.values() if each.default is inspect.Parameter.empty]
        if not (is_of_miles and len(required) == 1):
            signature.bind(*parameters)
    except (TypeError, ValueError) as error:
        raise PluginError(f"{key}: {error}; slime calls it with ({', '.join(parameters)}){_at(function)}") from None
    if is_async(function) and not allows_async:
        raise PluginError(f"{key}: is async, and slime calls it without await{_at(function)}")


def check_source(function: Any, args: SlimeArguments, *, key: str) -> None:
    """Check the imports of the file that a function is in, and what it and its neighbours read of ``args``.

    Raises:
        PluginError: If a name of slime is imported that is not supplied, or an argument read that there is not, with
            file and line.
    """
    try:
        path = inspect.getsourcefile(inspect.unwrap(function))
        tree = ast.parse(Path(path or "").read_text(encoding="utf-8"))
    except (OSError, TypeError, SyntaxError, ValueError):
        return  # what has no source is tried when it is called
    known = vars(args).keys() | {"changed"}
    for line, told in sorted({**dict(_imports(tree)), **dict(_unknown_arguments(tree, known))}.items()):
        raise PluginError(f"{key}: {told} ({_shown(str(path))}:{line})")


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Give lines with imports of what is not supplied, where the package is ours."""

    def is_ours(package: str) -> bool:
        return package in PACKAGES and not getattr(sys.modules.get(package), "__file__", None)

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                package, _, below = alias.name.partition(".")
                if is_ours(package) and not is_known(below):
                    yield node.lineno, f"{alias.name} is not supplied: see docs/slime-plugins.md"
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            package, _, below = node.module.partition(".")
            if not is_ours(package):
                continue
            for alias in node.names:
                inner = f"{below}.{alias.name}".strip(".")
                if alias.name != "*" and alias.name not in names_of(below) and not is_known(inner):
                    have = ", ".join(sorted(names_of(below))) or ", ".join(SUPPLIED)
                    yield (
                        node.lineno,
                        f"{node.module}.{alias.name} is not supplied; there is {have}: see docs/slime-plugins.md",
                    )


def _unknown_arguments(tree: ast.Module, known: Collection[str]) -> Iterator[tuple[int, str]]:
    """Give lines that read an argument that there is not, in functions whose first parameter is ``args``."""
    guarded: Mapping[str, bool] = {
        str(node.args[1].value): True
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "hasattr"
        and len(node.args) == 2
        and isinstance(node.args[1], ast.Constant)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        parameters = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
        names = [each for each in ast.walk(node) if isinstance(each, ast.Name) and each.id == "args"]
        if "args" not in parameters[:2] or any(isinstance(each.ctx, ast.Store) for each in names):
            continue
        for each in ast.walk(node):
            if (
                isinstance(each, ast.Attribute)
                and isinstance(each.value, ast.Name)
                and each.value.id == "args"
                and (_is_set(each) or not (each.attr in known or each.attr in guarded or each.attr.startswith("__")))
            ):
                told = f"args.{each.attr}: args cannot be set, but for a copy" if _is_set(each) else missing(each.attr)
                yield each.lineno, told


def _is_set(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store | ast.Del)


def _at(function: Any) -> str:
    try:
        found = inspect.unwrap(function)
        return f" ({_shown(str(inspect.getsourcefile(found)))}:{inspect.getsourcelines(found)[1]})"
    except (OSError, TypeError):
        return ""


def _shown(path: str) -> str:
    here = Path.cwd()
    return str(Path(path).resolve().relative_to(here)) if Path(path).resolve().is_relative_to(here) else path
