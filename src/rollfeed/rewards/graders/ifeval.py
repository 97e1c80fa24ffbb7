"""Graders ``ifeval`` and ``ifeval_loose``: the response follows every instruction of the metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from rollfeed.answers import after_reasoning
from rollfeed.errors import suggestion
from rollfeed.rewards.ifeval.instructions import INSTRUCTIONS, ArgumentError, follows
from rollfeed.rewards.labels import LabelError
from rollfeed.types import Verdict

Instructions: TypeAlias = Sequence[tuple[str, Mapping[str, Any]]]
"""Ids with their arguments."""
_ANY_RESPONSE = "a"
"""Arguments are read before a response is looked at."""


def instructions_of(label: Any, metadata: Mapping[str, Any]) -> Instructions:
    """Return what ``instruction_id_list`` of the metadata names, with the arguments of each from ``kwargs``.

    Raises:
        LabelError: If there is none, or the arguments are not those of as many.
    """
    names, kwargs = metadata.get("instruction_id_list"), metadata.get("kwargs")
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
        raise LabelError(f"instruction_id_list = {names!r:.80} must be a list of ids")
    if kwargs is None:
        kwargs = [{}] * len(names)
    if not isinstance(kwargs, list | tuple) or len(kwargs) != len(names):
        raise LabelError(f"kwargs must be a list with {len(names)} entries, one an instruction")
    instructions = []
    for name, arguments in zip(names, kwargs, strict=True):
        if arguments and not isinstance(arguments, Mapping):
            raise LabelError(f"kwargs of {name}: {arguments!r:.80} must be a mapping")
        given = {key: value for key, value in (arguments or {}).items() if value is not None}
        instructions.append((name, given))
    return instructions


def known_instructions_of(label: Any, metadata: Mapping[str, Any]) -> Instructions:
    """Return the instructions of the metadata. Raises LabelError if one is not known, or its arguments are wrong."""
    instructions = instructions_of(label, metadata)
    for name, arguments in instructions:
        if name not in INSTRUCTIONS:
            remedy = suggestion(name, INSTRUCTIONS)
            raise LabelError(f"instruction_id_list has {name!r:.60}, which is not known here; {remedy}")
        try:
            follows(_ANY_RESPONSE, name, arguments)
        except ArgumentError as error:
            raise LabelError(f"kwargs of {name}: {error}") from None
    return instructions


def compare_strictly(response: str, instructions: Instructions, metadata: Mapping[str, Any]) -> Verdict:
    """Give 1 when the response after its reasoning follows every instruction, else 0 (``ifeval``).

    An id that is not known is not followed; missing or wrong arguments are an ERROR.
    """
    return _compare([after_reasoning(response).strip()], instructions)


def compare_loosely(response: str, instructions: Instructions, metadata: Mapping[str, Any]) -> Verdict:
    """Compare as ``ifeval``, where any loose form of the response may follow an instruction (``ifeval_loose``).

    Of those are left out the first line, the last line or both, each with and without asterisks: what models put
    around answers.
    """
    lines = after_reasoning(response).strip().split("\n")
    texts = ["\n".join(part).strip() for part in (lines, lines[1:], lines[:-1], lines[1:-1])]
    return _compare([form for text in texts for form in (text, text.replace("*", ""))], instructions)


def _compare(forms: Sequence[str], instructions: Instructions) -> Verdict:
    failed = []
    for name, arguments in instructions:
        try:
            if not any(follows(form, name, arguments) for form in forms):
                failed.append(name if name in INSTRUCTIONS else f"{name} (unknown)")
        except ArgumentError as error:
            raise LabelError(f"{name}: {error}") from None
    return Verdict.graded(not failed, detail=f"not followed: {', '.join(failed)}"[:1_000] if failed else "")
