"""Checks of a slime plug-in before anything starts: its signature, its imports, what it reads of args."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from rollfeed.base.importing import is_async
from rollfeed.compat.slime_plugins.slime_args import SlimeArguments, missing
from rollfeed.compat.slime_plugins.supplied import PACKAGES, SUPPLIED, is_known, is_supplied, names_of
from rollfeed.errors import PluginError

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def check_call(
    function: Any, parameters: Sequence[str], *, key: str, allows_async: bool = False, allows_miles: bool = False
) -> None:
    """Check that a function takes what slime calls it with.

    Raises:
        PluginError: If it does not, or is async where slime's are not.
    """
    if not callable(function):
        raise PluginError(f"{key}: is a {type(function).__name__}, not a function")
    try:
        signature = inspect.signature(function)
        if not (allows_miles and is_of_miles(function)):
            signature.bind(*parameters)
    except (TypeError, ValueError) as error:
        raise PluginError(f"{key}: {error}; slime calls it with ({', '.join(parameters)}){_at(function)}") from None
    if is_async(function) and not allows_async:
        raise PluginError(f"{key}: is async, and slime calls it without await{_at(function)}")


def is_of_miles(function: Any) -> bool:
    """Whether a generate function has one parameter that must be given, as those of miles have."""
    parameters = inspect.signature(function).parameters.values()
    return sum(each.default is inspect.Parameter.empty for each in parameters) == 1


def check_source(function: Any, args: SlimeArguments, *, key: str) -> None:
    """Check what a function, and those of its file that it names, import and read of ``args``.

    Raises:
        PluginError: If a name of slime is imported that is not supplied, or an argument read that there is not, with
            file and line.
    """
    found = inspect.unwrap(function)
    try:
        path = inspect.getsourcefile(found)
        tree = ast.parse(Path(path or "").read_text(encoding="utf-8"))
    except (OSError, TypeError, SyntaxError, ValueError):
        return  # what has no source is tried when it is called
    problems: list[tuple[int, str]] = []
    for node in _reached(tree, getattr(found, "__name__", "")):
        problems += [*_imports(node), *_unknown_arguments(node, vars(args).keys())]
    for line, told in sorted(problems):
        raise PluginError(f"{key}: {told} ({_shown(str(path))}:{line})")


def _reached(tree: ast.Module, start: str) -> Iterator[ast.AST]:
    """Give the functions and classes of a file that one of them names, itself first."""
    known = {each.name: each for each in tree.body if isinstance(each, _DEFINITIONS)}
    ahead, seen = [start], {start}
    while ahead:
        node = known.get(ahead.pop())
        if node is not None:
            yield node
            named = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} & known.keys() - seen
            seen |= named
            ahead.extend(sorted(named))


def _imports(found: ast.AST) -> Iterator[tuple[int, str]]:
    """Give lines with imports of what is not supplied; those of the file itself have been made by now."""
    for node in ast.walk(found):
        if isinstance(node, ast.Import):
            names = [("", alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [(node.module, alias.name) for alias in node.names if alias.name != "*"]
        else:
            continue
        for module, name in names:
            package, _, below = f"{module}.{name}".strip(".").partition(".")
            inside = module.partition(".")[2]
            if package in PACKAGES and is_supplied(package) and not is_known(below) and name not in names_of(inside):
                have = ", ".join(sorted(names_of(inside))) or ", ".join(SUPPLIED)
                yield node.lineno, f"{package}.{below} is not supplied; there is {have}: see docs/slime-plugins.md"


def _unknown_arguments(found: ast.AST, known: Collection[str]) -> Iterator[tuple[int, str]]:
    """Give lines that set an argument, or read one that there is not, in functions with a parameter ``args``."""
    asked = {
        each.args[1].value
        for each in ast.walk(found)
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id == "hasattr"
        if len(each.args) == 2 and isinstance(each.args[1], ast.Constant)
    }
    for node in ast.walk(found):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        parameters = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
        names = [each for each in ast.walk(node) if isinstance(each, ast.Name) and each.id == "args"]
        if "args" not in parameters[:2] or any(isinstance(each.ctx, ast.Store) for each in names):
            continue
        for each in ast.walk(node):
            if not isinstance(each, ast.Attribute) or each.value not in names or each.attr.startswith("__"):
                continue
            if not isinstance(each.ctx, ast.Load):
                yield each.lineno, f"args.{each.attr}: args cannot be set, but for a copy"
            elif each.attr not in known and each.attr not in asked:
                yield each.lineno, missing(each.attr)


def _at(function: Any) -> str:
    try:
        found = inspect.unwrap(function)
        return f" ({_shown(str(inspect.getsourcefile(found)))}:{inspect.getsourcelines(found)[1]})"
    except (OSError, TypeError):
        return ""


def _shown(path: str) -> str:
    here = Path.cwd()
    return str(Path(path).resolve().relative_to(here)) if Path(path).resolve().is_relative_to(here) else path
