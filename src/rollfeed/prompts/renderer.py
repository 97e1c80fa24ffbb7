"""From a question to token ids, once for a whole group.

Invariant: a prompt has the special tokens its template or its tokenizer puts there, once: rendered chat text is
encoded without adding any, raw text with those that the tokenizer puts before it, unless it begins with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfeed.errors import ConfigError
from rollfeed.prompts.chat_template import NO_TEMPLATE
from rollfeed.protocols import Tokenizer
from rollfeed.types import Message
from rollfeed.types.text import well_formed


class ChatRenderer:
    """Renders through the tokenizer's chat template, or takes text as it is.

    Args:
        tokenizer: Of the model that will answer.
        rollout_max_prompt_len: The longest prompt, in tokens; None for any.
    """

    def __init__(self, tokenizer: Tokenizer, *, rollout_max_prompt_len: int | None) -> None:
        self._tokenizer = tokenizer
        self._rollout_max_prompt_len = rollout_max_prompt_len

    def render(
        self,
        content: str | Sequence[Message],
        *,
        apply_chat_template: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        num_images: int = 0,
    ) -> tuple[str, NDArray[np.int32]]:
        """Return the text and its token ids ``(P,)``; a string is one user turn of a chat.

        Raises:
            ConfigError: If the model has no chat template but one is to be applied, the template refuses the
                messages, messages come without a template, or nothing is left to send.
        """
        if apply_chat_template:
            messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
            text = self._tokenizer.render_chat(messages, tools=tools, num_images=num_images)
        elif isinstance(content, str):
            text = well_formed(content)
        else:
            raise ConfigError("a list of messages needs the chat template: set apply_chat_template = true")
        token_ids = self._tokenizer.encode(text, add_special_tokens=not apply_chat_template)
        if not len(token_ids):
            raise ConfigError("the prompt has no tokens")
        token_ids.setflags(write=False)
        return text, token_ids

    def check_template(self) -> None:
        """Return when the model has a chat template.

        Raises:
            ConfigError: If it has none.
        """
        if not self._tokenizer.has_chat_template:
            raise ConfigError(NO_TEMPLATE)

    def fits(self, token_ids: NDArray[np.int32]) -> bool:
        """Whether the prompt is within ``rollout_max_prompt_len`` tokens."""
        return self._rollout_max_prompt_len is None or len(token_ids) <= self._rollout_max_prompt_len
