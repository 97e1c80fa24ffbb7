"""A renderer without a model: one token a character."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rollfeed.environments import EnvironmentGrader, EnvironmentRegistry
from rollfeed.protocols import PromptRenderer, Rendered
from rollfeed.types import Correct, Message, Picture, Verdict


class HashLoader:
    """Keeps nothing of pictures but their hashes."""

    def load(self, given: str, *, folder: Path | None = None) -> Picture:
        digest = sha256(given.encode()).hexdigest()
        return Picture(content_hash=digest, media_type="image/png", width=32, height=32)


class CharacterRenderer:
    loader = HashLoader()

    def __init__(self, limit: int | None) -> None:
        self._limit = limit

    def render(
        self,
        content: str | Sequence[Message],
        *,
        apply_chat_template: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        images: Sequence[Picture] = (),
    ) -> Rendered:
        text = f"<user>{content}" if apply_chat_template else str(content)
        text += "".join(image.content_hash for image in images)
        messages = ({"role": "user", "content": content},) if apply_chat_template else None
        return Rendered(text, np.array([ord(char) for char in text], np.int32), messages, None, tuple(images))

    def fits(self, token_ids: NDArray[np.int32]) -> bool:
        return self._limit is None or len(token_ids) <= self._limit


class Parity:
    """A small environment as a user would write it."""

    environment_id: str = "my/parity"
    version: int = 3
    summary: str = "even or odd"
    max_level: int | None = None

    def make(self, level: int, random: Any) -> tuple[str, dict[str, Any], str | None]:
        number = random.randrange(10 ** (level + 1))
        return f"Is {number} even or odd?", {"number": number}, "odd" if number % 2 else "even"

    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        right = response == ("odd" if params["number"] % 2 else "even")
        return Verdict(reward=float(right), correct=Correct.YES if right else Correct.NO)


@pytest.fixture
def parity() -> Parity:
    return Parity()


@pytest.fixture
def make_renderer() -> Callable[..., PromptRenderer]:
    return lambda limit=None: CharacterRenderer(limit)


@pytest.fixture
def make_grader() -> Callable[[Any], EnvironmentGrader]:
    """Return a factory of graders that know one environment, and have no workers."""

    class NoWorkers:
        async def call(self, *args: Any, **settings: Any) -> Any:
            raise AssertionError("called")

    def make(environment: Any) -> EnvironmentGrader:
        registry = EnvironmentRegistry([environment], find_entry_points=lambda: [])
        return EnvironmentGrader(registry, workers=NoWorkers(), deadline_seconds=1.0)

    return make
