"""The marks that a chat template puts around the turns of an assistant, found by rendering."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rollfeed.conversations import Chat
from rollfeed.errors import ConfigError
from rollfeed.protocols import Tokenizer
from rollfeed.types import Message

_SAID, _TOLD = "rollfeedsaid", "rollfeedtold"
_QUESTION: Message = {"role": "user", "content": "?"}
_CALL = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
_AFTER: tuple[tuple[Message, Message], ...] = (
    ({"role": "assistant", "content": _SAID}, {"role": "user", "content": _TOLD}),
    (
        {"role": "assistant", "content": _SAID, "tool_calls": [_CALL]},
        {"role": "tool", "content": _TOLD, "tool_call_id": "call00000", "name": "look"},
    ),
)
_TEXT_MARGIN = 8
"""Tokens shown on either side of a finding."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Texts and tokens around sampled turns, and the tokenizer that shows them."""

    tokenizer: Tokenizer
    end_ids: NDArray[np.int32]
    """Tokens that end a turn."""
    stops: tuple[str, ...] = ()
    """Texts that end one, too."""
    ends_turns: bool = True
    """Whether the chat template puts such a token behind a turn."""
    head: str = ""
    """How what follows a turn begins in the template, without the token that ends the turn; empty if nobody knows."""
    openings: tuple[str, ...] = ()
    """What the template shows last before a turn, behind a message of a user or of a tool."""
    once_ids: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    """Special tokens that a conversation begins with, and has nowhere else."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, stops: Sequence[str] = (), stop_token_ids: Sequence[int] = ()) -> Marks:
        """Find the marks of a tokenizer and of the settings that its turns were sampled with."""
        end_ids = np.array([*tokenizer.eos_token_ids, *stop_token_ids], np.int32)
        found = [parts for parts in (_around(tokenizer, *after) for after in _AFTER) if parts is not None]
        if not tokenizer.has_chat_template or not found:
            return cls(tokenizer, end_ids, tuple(stops))
        before, _ = found[0]
        first = tokenizer.encode(before, add_special_tokens=False)[:1]
        ends_turns = bool(np.isin(first, end_ids).any())
        end = tokenizer.decode(first, skip_special_tokens=False) if ends_turns else ""
        head = before.removeprefix(end).partition("user")[0]
        head = head if head.strip() else ""
        openings = tuple(dict.fromkeys(opening for _, opening in found if opening))
        shown = Chat(tokenizer).render([_QUESTION], add_generation_prompt=True)
        bos = tokenizer.encode(shown, add_special_tokens=False)[:1]
        text = tokenizer.decode(bos, skip_special_tokens=False)
        is_special = not tokenizer.decode(bos, skip_special_tokens=True) and not np.isin(bos, end_ids).any()
        is_once = is_special and not any(text in told for parts in found for told in parts)
        return cls(tokenizer, end_ids, tuple(stops), ends_turns, head, openings, bos if is_once else bos[:0])

    def begins_twice(self, token_ids: NDArray[np.int32]) -> bool:
        """Whether tokens begin with a special token, twice."""
        first = token_ids[:2]
        is_twice = len(first) == 2 and first[0] == first[1]
        return is_twice and not self.tokenizer.decode(first, skip_special_tokens=True)

    def is_end(self, token_ids: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return which tokens end a turn."""
        # Faster than np.isin: they are few.
        return np.asarray((token_ids[:, None] == self.end_ids).any(axis=1))

    def ends_at_stop(self, token_ids: NDArray[np.int32], others: Sequence[str] = ()) -> bool:
        """Whether the text of these tokens ends where a stop string is in it, or one of others."""
        stops = (*self.stops, *others)
        if not stops or not len(token_ids):
            return False
        text = self.decode(token_ids[-max(map(len, stops)) - 1 :])
        last = len(self.decode(token_ids[-1:]))
        return any(stop in text[-last - len(stop) + 1 :] for stop in stops)

    def opens(self, token_ids: NDArray[np.int32]) -> bool:
        """Whether the text of these tokens ends with an opening of a turn."""
        tail = self.decode(token_ids[-4 * max(map(len, self.openings), default=1) :])
        return any(tail.endswith(opening) for opening in self.openings)

    def opening_in(self, token_ids: NDArray[np.int32]) -> int | None:
        """Return how many tokens there are to the end of the first opening in them; None without one."""
        text = self.decode(token_ids)
        ends = [text.find(opening) + len(opening) for opening in self.openings if opening in text]
        if not ends:
            return None
        return len(self.tokenizer.encode(text[: min(ends)], add_special_tokens=False))

    def is_told(self, token_ids: NDArray[np.int32]) -> bool:
        """Whether tokens behind a turn begin as the template begins what follows one."""
        start = 1 if self.is_end(token_ids[:1]).any() else 0
        return bool(self.head) and self.decode(token_ids[start : start + 4 * len(self.head)]).startswith(self.head)

    def decode(self, token_ids: NDArray[np.int32]) -> str:
        """Return the text of tokens, special ones included."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)


def _around(tokenizer: Tokenizer, said: Message, told: Message) -> tuple[str, str] | None:
    """Return what is shown between a turn and what it is told, and from there to the next turn."""
    try:
        whole = Chat(tokenizer).render([_QUESTION, said, told], add_generation_prompt=True)
    except ConfigError:
        return None
    shown, found, opening = whole.rpartition(_TOLD)
    # Beside calls, some templates show nothing of what is said.
    before = shown.rpartition(_SAID)[2] if _SAID in shown else ""
    return (before, opening) if found else None


def text_around(token_ids: NDArray[np.int32], start: int, end: int, marks: Marks | None) -> str:
    """Return tokens and a few around them for people; many are shortened in the middle."""
    first, behind = max(0, start - _TEXT_MARGIN), min(len(token_ids), end + _TEXT_MARGIN)
    parts = [token_ids[first:start], token_ids[start:end], token_ids[end:behind]]
    shown = [" ".join(map(str, part.tolist())) if marks is None else marks.decode(part) for part in parts]
    middle = shown[1] if len(shown[1]) <= 160 else f"{shown[1][:80]} ... {shown[1][-80:]}"
    return f"{shown[0]} >>>{middle}<<< {shown[2]}".strip()
