"""Graders ``ifeval`` and ``ifeval_loose``: the response follows every instruction of the metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollfeed.answers import after_reasoning
from rollfeed.errors import suggestion
from rollfeed.rewards.ifeval import INSTRUCTIONS, ArgumentError, follows, loose_forms
from rollfeed.types import Correct, Outcome, Verdict

_ANY_RESPONSE = "a"
"""Arguments are read before a response is looked at."""


def grade_ifeval(response: str, label: Any, metadata: Mapping[str, Any]) -> Verdict:
    """Give 1 when the response after its reasoning follows every instruction; else 0.

    ``instruction_id_list`` names them, ``kwargs`` has the arguments of each. An id that is not known is not
    followed; missing or wrong arguments are an ERROR.
    """
    return _grade(metadata, [after_reasoning(response).strip()])


def grade_ifeval_loose(response: str, label: Any, metadata: Mapping[str, Any]) -> Verdict:
    """Grade as ``ifeval``, where an instruction counts as followed when any loose form of the response follows it."""
    return _grade(metadata, loose_forms(after_reasoning(response).strip()))


def ifeval_problem(label: Any, metadata: Mapping[str, Any]) -> str | None:
    """Fits :data:`rollfeed.rewards.labels.LabelProblem`; no label is needed, and every instruction has to be known."""
    found = _instructions(metadata)
    if isinstance(found, str):
        return found
    for name, arguments in found:
        if name not in INSTRUCTIONS:
            return f"instruction_id_list has {name!r:.60}, which is not known here; {suggestion(name, INSTRUCTIONS)}"
        try:
            _follows_any([_ANY_RESPONSE], name, arguments)
        except ArgumentError as error:
            return f"kwargs of {name}: {error}"
    return None


def _grade(metadata: Mapping[str, Any], forms: Sequence[str]) -> Verdict:
    found = _instructions(metadata)
    if isinstance(found, str):
        return _error(found)
    failed = []
    for name, arguments in found:
        try:
            if not _follows_any(forms, name, arguments):
                failed.append(name if name in INSTRUCTIONS else f"{name} (unknown)")
        except ArgumentError as error:
            return _error(f"{name}: {error}")
    detail = f"not followed: {', '.join(failed)}" if failed else ""
    return Verdict(reward=0.0 if failed else 1.0, correct=Correct.NO if failed else Correct.YES, detail=detail[:1_000])


def _instructions(metadata: Mapping[str, Any]) -> list[tuple[str, Any]] | str:
    """Return the ids with their arguments, or what is wrong with them."""
    names, kwargs = metadata.get("instruction_id_list"), metadata.get("kwargs")
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
        return f"instruction_id_list = {names!r:.80} must be a list of ids"
    if kwargs is None:
        kwargs = [{}] * len(names)
    if not isinstance(kwargs, list | tuple) or len(kwargs) != len(names):
        return f"kwargs must be a list with {len(names)} entries, one an instruction"
    return [(name, arguments or {}) for name, arguments in zip(names, kwargs, strict=True)]


def _follows_any(forms: Sequence[str], name: str, arguments: Any) -> bool:
    if not isinstance(arguments, Mapping):
        raise ArgumentError(f"{arguments!r:.80} must be a mapping")
    given = {key: value for key, value in arguments.items() if value is not None}
    check: Callable[[str], bool] = lambda form: follows(form, name, given)  # noqa: E731
    return any(check(form) for form in forms)


def _error(detail: str) -> Verdict:
    return Verdict(reward=None, outcome=Outcome.ERROR, detail=f"rm_type ifeval: {detail}")
