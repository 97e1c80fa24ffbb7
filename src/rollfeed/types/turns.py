"""The turns of an answering of several, as its journal keeps them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rollfeed.types.engine import Completion


@dataclass(frozen=True, slots=True)
class Sampled:
    """A request to the engine, and its reply."""

    sent: NDArray[np.int32]
    """What was sent, without what was sent or sampled before. ``(N,)``."""
    completion: Completion


@dataclass(frozen=True, slots=True)
class Called:
    """The intention to call a tool, which may have been carried out."""

    tool: str
    arguments: Any
    """JSON values."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer of the tool."""

    answer: Any
    """JSON values."""
    place: int = 0
    """Which of the calls that were made together it answers."""
    seconds: float = 0.0
    """How long that took."""


Turn: TypeAlias = Sampled | Called | Answered
