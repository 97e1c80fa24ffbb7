"""The tests of a programming problem, from a prompt's label."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from rollfeed.errors import RewardError
from rollfeed.rewards.labels import NO_LABEL


@dataclass(frozen=True, slots=True)
class CodeTest:
    """The input of a program, and the answer that it must give."""

    stdin: str
    """Text, or for a call the JSON list of arguments."""
    expected: Any
    """Text, or for a call the JSON value of the result."""


@dataclass(frozen=True, slots=True)
class CodeTests:
    """All tests of a problem, at least one; with ``function`` they are calls of it."""

    function: str | None
    tests: tuple[CodeTest, ...]


def tests_problem(label: Any, metadata: Mapping[str, Any]) -> str | None:
    """Fits :data:`rollfeed.rewards.labels.LabelProblem`."""
    if label is None:
        return NO_LABEL
    try:
        parse_tests(label, metadata)
    except RewardError as error:
        return str(error)
    return None


def parse_tests(label: Any, metadata: Mapping[str, Any]) -> CodeTests:
    """Return the tests of a label: ``{"inputs", "outputs"[, "fn_name"]}`` or a list of ``{"input", "output"}``.

    A label may be JSON text of it. ``fn_name`` may stand in the metadata as well; entries of a list may say by their
    ``testtype``, ``stdin`` or ``functional``, whether it is needed.

    Raises:
        RewardError: If the label is anything else.
    """
    given = _from_json(label, "the label") if isinstance(label, str) else label
    function = metadata.get("fn_name") or metadata.get("func_name")
    if isinstance(given, Mapping):
        function = given.get("fn_name") or function
        inputs, outputs = given.get("inputs"), given.get("outputs")
    elif _is_list(given) and all(isinstance(test, Mapping) for test in given):
        inputs, outputs = [test.get("input") for test in given], [test.get("output") for test in given]
        function = _function_of_kinds({test.get("testtype") for test in given if test.get("testtype")}, function)
    else:
        raise RewardError(f"the label is {given!r:.80}; a program needs inputs and outputs to be tested with")
    if not _is_list(inputs) or not _is_list(outputs):
        raise RewardError("the label must have the lists inputs and outputs")
    if not inputs or len(inputs) != len(outputs):
        raise RewardError(f"the label has {len(inputs)} inputs and {len(outputs)} outputs; it needs as many of each")
    if function is not None and not (isinstance(function, str) and function.isidentifier()):
        raise RewardError(f"fn_name {function!r:.80} is not the name of a function")
    make = _script_test if function is None else _call_test
    return CodeTests(function, tuple(make(*pair) for pair in zip(inputs, outputs, strict=True)))


def _function_of_kinds(kinds: set[Any], function: Any) -> Any:
    if kinds == {"stdin"}:
        return None
    if kinds == {"functional"} and function is None:
        raise RewardError("the tests are functional; the label or the metadata must name the function in fn_name")
    if kinds - {"functional"}:
        raise RewardError(
            f"testtype is {sorted(map(str, kinds))}; it must be stdin or functional, the same for all tests"
        )
    return function


def _script_test(given: Any, expected: Any) -> CodeTest:
    return CodeTest(_text(given), _text(expected))


def _call_test(given: Any, expected: Any) -> CodeTest:
    if isinstance(given, str):
        args = [_from_json(line, "an input") for line in given.split("\n") if line.strip()]
    elif _is_list(given):
        args = list(given)
    else:
        raise RewardError(f"an input is {given!r:.80}; a call needs its arguments, one JSON value a line")
    return CodeTest(json.dumps(args), _from_json(expected, "an output") if isinstance(expected, str) else expected)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if _is_list(value):
        return "\n".join(_text(line) for line in value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise RewardError(f"an input or output is {value!r:.80}; it must be text")


def _from_json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RewardError(f"{what} is not JSON: {text!r:.80}") from error


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
