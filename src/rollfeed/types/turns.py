"""What an answering of several turns has done, as its journal keeps it."""

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
    """What the tool answered."""

    answer: Any
    """JSON values."""


Turn: TypeAlias = Sampled | Called | Answered
