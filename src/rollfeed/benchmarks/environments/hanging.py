"""An environment for the measurement of draws, in a module that workers import quickly."""

from __future__ import annotations

import time
from typing import Any

from rollfeed.types import Correct, Verdict


class Hanging:
    """Hangs at every level but the lowest, with one problem in eight: for the measurement of draws."""

    environment_id: str = "bench/hanging"
    version: int = 1
    summary: str = "hangs"
    max_level: int | None = 3

    def make(self, level: int, random: Any) -> tuple[str, dict[str, Any], str | None]:
        """Return a number, or nothing ever."""
        number = random.randrange(10**6)
        if level and number % 8 == 0:
            time.sleep(1e6)
        return f"{number}?", {"number": number}, str(number)

    def verify(self, params: Any, response: str) -> Verdict:
        """Take anything."""
        return Verdict(reward=1.0, correct=Correct.YES)
