"""A template that rewrites every earlier turn is found before a run that refuses that."""

from pathlib import Path
from typing import Any, cast

import pytest
from tests.conversations.zoo.families import load

from rollfeed.cli.checking import _template_text
from rollfeed.errors import ConfigError
from rollfeed.protocols import RewrittenTurns


class Loaded:
    """What of a model's files says how it converses."""

    checkpoint = Path("model")

    def __init__(self, name: str) -> None:
        self.tokenizer = load(name)


def template_text(name: str, rewritten: RewrittenTurns) -> str | None:
    return _template_text(cast(Any, Loaded(name)), rewritten)


def test_a_template_that_rewrites_turns_is_refused_where_that_is_refused() -> None:
    assert (
        template_text("counted", RewrittenTurns.FORK)
        == "turns end with <|end|>; what was sent before is rendered anew in each turn"
    )
    with pytest.raises(ConfigError, match=r"rollout\.rewritten_turns = 'refuse': turns end with .* rendered anew"):
        template_text("counted", RewrittenTurns.REFUSE)
    assert template_text("chatml", RewrittenTurns.REFUSE) is not None
