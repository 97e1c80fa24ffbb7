"""Tools that policies call in episodes, and the box that keeps them within their limits."""

from rollfeed.tools.registry import make_tools
from rollfeed.tools.toolbox import LimitedToolbox

__all__ = ["LimitedToolbox", "make_tools"]
