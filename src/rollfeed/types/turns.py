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


@dataclass(frozen=True, slots=True)
class Replied:
    """A turn of an agent that speaks through the gateway."""

    number: int
    """Of its session; a turn that goes on from this one names it."""
    parent: int | None
    """The turn before it in the history that asked for it."""
    context: NDArray[np.int32]
    """What was sent, without the tokens before where it goes on from the parent's. ``(N,)``."""
    completion: Completion
    about: Any
    """What else the gateway knows of it: JSON values."""


Turn: TypeAlias = Sampled | Called | Answered | Replied
