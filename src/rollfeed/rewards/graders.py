"""The built-in graders by ``rm_type``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rollfeed.protocols import Grader
from rollfeed.rewards.exact import grade_exact
from rollfeed.rewards.number import grade_number

BUILTIN_GRADERS: Mapping[str, Grader] = MappingProxyType({"exact": grade_exact, "number": grade_number})
"""``rm_type`` of every grader of this package; environments add ``environment``."""
