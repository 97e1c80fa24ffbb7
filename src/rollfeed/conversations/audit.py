"""Tries what a chat template keeps of a conversation that goes on, before anything is sampled."""

from __future__ import annotations

from dataclasses import dataclass

from rollfeed.conversations.chat import Chat, Suffix
from rollfeed.errors import ConfigError
from rollfeed.protocols import Tokenizer
from rollfeed.types import Message

_BEFORE: list[Message] = [{"role": "user", "content": "What is 1 + 1?"}]
_AFTER: list[Message] = [{"role": "user", "content": "And 2 + 2?"}]
_SAID = "It is 2."
_THOUGHT = "<think>\nOne and one.\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class TemplateAudit:
    """Says how an assistant's turns stand in later renders."""

    ends_turns_with: str | None
    """The token behind a turn that ends it; None where the template has none there."""
    keeps_turns: bool
    """Whether a render begins with the one before and what was said."""
    keeps_thinking: bool
    """Whether it does where that begins with a thought in think tags."""
    keeps_space: bool
    """Whether it does where that ends with white space."""

    def describe(self) -> str:
        ending = f"turns end with {self.ends_turns_with}" if self.ends_turns_with else "no token ends a turn"
        if not self.keeps_turns:
            return f"{ending}; what was sent before is rendered anew in each turn"
        changes = [
            *(["thoughts of earlier turns are left out"] if not self.keeps_thinking else []),
            *(["white space at the end of turns is cut off"] if not self.keeps_space else []),
        ]
        return f"{ending}; {' and '.join(changes) or 'earlier turns stay as they were said'}"


def audit_template(tokenizer: Tokenizer) -> TemplateAudit:
    """Try what a tokenizer's chat template keeps.

    Raises:
        ConfigError: If it refuses a conversation of a question, an answer and a question.
    """
    chat = Chat(tokenizer)
    asked = chat.render(_BEFORE, add_generation_prompt=True)

    def after(said: str) -> Suffix:
        return chat.suffix(_BEFORE, asked + said, [{"role": "assistant", "content": said}], _AFTER)

    def keeps(said: str) -> bool:
        try:
            return after(said).extends
        except ConfigError:
            return False

    suffix = after(_SAID)
    first = [int(token) for token in tokenizer.encode(suffix.text, add_special_tokens=False)[:1]]
    ends = first[0] in tokenizer.eos_token_ids if first else False
    return TemplateAudit(
        ends_turns_with=tokenizer.decode(first, skip_special_tokens=False) if ends else None,
        keeps_turns=suffix.extends,
        keeps_thinking=keeps(_THOUGHT + _SAID),
        keeps_space=keeps(f"{_SAID}\n \n"),
    )
