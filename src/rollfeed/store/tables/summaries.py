"""Groups and samples without their tokens and texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollfeed.types import Correct, Message, SampleStatus
from rollfeed.types.fields import fields_of, from_dict

SUMMARY_COLUMNS = (
    *("group_index", "prompt_id", "source", "prompt", "messages", "rollout_id", "index"),
    *("reward", "correct", "status", "response_length", "error"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSummary:
    """One sample of a group, without its tokens and text."""

    rollout_id: int
    index: int | None
    """None when the rollout failed without leaving a sample."""
    reward: float | None
    correct: Correct | None
    """None when it was not graded."""
    status: SampleStatus
    response_length: int
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """One group of a step, without its tokens and text."""

    group_index: int
    prompt_id: str
    source: str
    prompt: str
    """What was tokenised."""
    question: str
    """What the user asked: the last user message, or the whole prompt when it is raw text."""
    members: tuple[MemberSummary, ...]
    drop_reason: str | None
    """None when the group was kept."""


def question_of(prompt: str, messages: Sequence[Message]) -> str:
    """Return the text of the last user message, or the prompt without one."""
    for message in reversed(messages):
        content = message.get("content")
        if message.get("role") == "user" and content:
            return content if isinstance(content, str) else "\n".join(_text_parts(content))
    return prompt


def _text_parts(content: Sequence[Any]) -> list[str]:
    return [str(part.get("text", f"[{part.get('type')}]")) if isinstance(part, dict) else str(part) for part in content]


def group_summary(rows: Sequence[dict[str, Any]]) -> GroupSummary:
    """Return a group of which the rows have :data:`SUMMARY_COLUMNS`, and why it was dropped, if it was."""
    first = rows[0]
    return GroupSummary(
        **{name: first[name] for name in ("group_index", "prompt_id", "source", "prompt")},
        question=question_of(first["prompt"], json.loads(first["messages"] or "[]")),
        members=tuple(_member_summary(row) for row in rows if row["rollout_id"] is not None),
        drop_reason=first.get("drop_reason"),
    )


def _member_summary(row: dict[str, Any]) -> MemberSummary:
    values = {field.name: row[field.name] for field in fields_of(MemberSummary)}
    return from_dict(MemberSummary, {**values, "response_length": row["response_length"] or 0})
