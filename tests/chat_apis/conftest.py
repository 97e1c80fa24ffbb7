"""Turns as an engine samples them, with a tokenizer of one id a character."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rollfeed.chat_apis import Asked, Said, said_of
from rollfeed.protocols import CallFormat
from rollfeed.testing import CharTokenizer
from rollfeed.types import Completion, CompletionTimings, FinishKind, FinishReason, VersionSpan

END = "\x03"
Saying = Callable[..., Said]


def completion_of(text: str, *, finish: FinishReason) -> Completion:
    token_ids = CharTokenizer().encode(text, add_special_tokens=False)
    return Completion(
        token_ids=token_ids,
        logprobs=np.full(len(token_ids), -0.5, np.float32),
        text=text,
        finish_reason=finish,
        version_spans=(VersionSpan(0, len(token_ids), 0),) if len(token_ids) else (),
        precision="fp32",
        prompt_tokens=11,
        cached_tokens=4,
        timings=CompletionTimings(0.0, 0.0),
    )


@pytest.fixture
def saying() -> Saying:
    """What is said of a turn that was sampled; it ends with the end of turn unless a reason is given."""

    def said(
        text: str,
        asked: Asked,
        *,
        finish: FinishReason | None = None,
        in_thought: bool = False,
        first_call: int = 0,
        call_format: CallFormat = CallFormat.HERMES,
    ) -> Said:
        if finish is None:
            text, finish = text + END, FinishReason(FinishKind.STOP, ord(END))
        return said_of(
            completion_of(text, finish=finish),
            asked,
            CharTokenizer(),
            call_format,
            in_thought=in_thought,
            first_call=first_call,
        )

    return said
