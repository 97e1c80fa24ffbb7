"""Questions to judges: a rubric, filled with what is judged.

Invariants: the rubric alone is a template, and is read once; whatever a prompt, a response or a label says stays text;
no response can end the fence around it, as the fence is made of what it encloses.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from rollfeed.answers import after_reasoning
from rollfeed.config.judge import JudgeMode, JudgeReply, JudgeSettings
from rollfeed.errors import ConfigError, suggestion
from rollfeed.rewards.hub import MESSAGES_KEY, PROMPT_KEY
from rollfeed.rewards.labels import LabelError
from rollfeed.types.text import template_fields, text_of

_SHOWN = {
    JudgeMode.SINGLE: ("response",),
    JudgeMode.PAIRWISE: ("response_a", "response_b"),
    JudgeMode.LISTWISE: ("responses",),
}
"""The fields that a rubric must have."""
_FURTHER = ("prompt", "label", "fence")
_METADATA = "metadata."
_PICTURE = "[a picture]"
_IN_METADATA = f"{_METADATA}NAME"


@dataclass(frozen=True, slots=True)
class JudgeQuestion:
    """The text of a question to a judge."""

    text: str
    num_cut: int
    """Responses that were too long to be shown whole."""


class Rubric:
    """Asks about one response, or about several, in the order in which they are given.

    Raises:
        ConfigError: If it is no template, names an unknown field or does not show what is judged.
    """

    def __init__(self, text: str, settings: JudgeSettings, *, key: str) -> None:
        try:
            self._pieces = template_fields(text)
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from None
        self._settings = settings
        self._names = [name for _, name in self._pieces if name is not None]
        shown = _SHOWN[settings.mode]
        known = (*shown, *_FURTHER)
        for name in self._names:
            if name not in known and not (name.startswith(_METADATA) and name != _METADATA):
                raise ConfigError(f"{key}: {{{name}}} is no field; {suggestion(name, (*known, _IN_METADATA))}")
        for name in shown:
            if name not in self._names:
                raise ConfigError(f"{key}: does not show the judge what it judges: write {{{name}}} where it is to be")
        self._end = _instruction(settings) if settings.instruction is None else settings.instruction

    def problem(self, label: Any, metadata: Mapping[str, Any]) -> LabelError | None:
        """Return why nothing can be asked about answers to a prompt; None if something can."""
        for name in self._names:
            if name == "label" and label is None:
                error = LabelError("there is no label, and the rubric has {label}")
                error.is_missing = True
                return error
            if name.startswith(_METADATA) and _entry(metadata, name) is None:
                return LabelError(f"the metadata has no {name.removeprefix(_METADATA)!r}, and the rubric shows it")
        return None

    def ask(self, responses: Sequence[str], label: Any, metadata: Mapping[str, Any]) -> JudgeQuestion:
        """Return the question. Raises LabelError as :meth:`problem` says."""
        if error := self.problem(label, metadata):
            raise error
        settings = self._settings
        whole = [each if settings.sees_reasoning else after_reasoning(each).strip() for each in responses]
        shown = [_cut(each, settings.max_response_chars) for each in whole]
        values = {name: _shown(_entry(metadata, name)) for name in self._names if name.startswith(_METADATA)}
        values |= {"prompt": _prompt(metadata), "label": _shown(label)}
        values["fence"] = fence = _fence([*values.values(), *shown])
        if settings.mode is JudgeMode.LISTWISE:
            listed = (f"Response {number}:\n{fence}\n{each}\n{fence}" for number, each in enumerate(shown, start=1))
            values["responses"] = "\n\n".join(listed)
        else:
            values |= dict(zip(_SHOWN[settings.mode], shown, strict=True))
        text = "".join(piece + ("" if name is None else values[name]) for piece, name in self._pieces)
        end = f"\n\n{self._end}" if self._end else ""
        return JudgeQuestion(text.rstrip() + end, sum(a is not b for a, b in zip(whole, shown, strict=True)))


def _instruction(settings: JudgeSettings) -> str:
    if settings.mode is JudgeMode.LISTWISE:
        return (
            "End your reply with a line of this form, with the numbers of all responses from the best to the worst, "
            "and = between equals:\nRanking: 2 > 1 = 3"
        )
    if settings.verdict_form is JudgeReply.TOOL:
        return "Give your verdict by calling the function verdict."
    if settings.verdict_form is JudgeReply.NUMBER:
        low, high = settings.score_range
        return f"End your reply with a line of this form, N being a number from {low:g} to {high:g}:\nScore: N"
    *first, last = settings.scores
    kind = "letter" if all(len(choice) == 1 for choice in settings.scores) else "word"
    asked = f"Answer with one {kind} and nothing else: {', '.join(first)} or {last}."
    if settings.mode is JudgeMode.PAIRWISE:
        asked += " A says that response A is better, B that response B is, and C that neither is."
    return asked


def _prompt(metadata: Mapping[str, Any]) -> str:
    """Return what was asked: one turn as it is, several with their roles, and where there are none the whole text."""
    prompt = metadata.get(MESSAGES_KEY) or metadata.get(PROMPT_KEY)
    if not isinstance(prompt, Sequence) or isinstance(prompt, str):
        return _shown(prompt)
    turns = [(str(turn.get("role")), _content(turn.get("content"))) for turn in prompt if isinstance(turn, Mapping)]
    return turns[0][1] if len(turns) == 1 else "\n\n".join(f"{role}: {text}" for role, text in turns)


def _content(content: Any) -> str:
    """Return the content of a message as one text, in which a picture is named and not left out."""
    if not isinstance(content, list | tuple):
        return text_of(content)
    is_picture = (isinstance(part, Mapping) and part.get("type") == "image" for part in content)
    return "".join(_PICTURE if each else text_of([part]) for each, part in zip(is_picture, content, strict=True))


def _entry(metadata: Mapping[str, Any], name: str) -> Any:
    found: Any = metadata
    for part in name.removeprefix(_METADATA).split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _shown(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False, default=str)


def _cut(text: str, most_chars: int) -> str:
    if len(text) <= most_chars:
        return text
    half = most_chars // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n[... {left_out:,} characters are left out here ...]\n{text[-half:]}"


def _fence(texts: Iterable[str]) -> str:
    mark = blake2b("\0".join(texts).encode("utf-8", "replace"), digest_size=12).hexdigest()
    return f"-----{mark}-----"
