"""Settings files made of slime's and miles's scripts."""

from rollfeed.compat.convert.conversion import Converted, Left, convert_script
from rollfeed.compat.convert.eval_flags import EVAL_FLAGS, eval_overrides

__all__ = ["EVAL_FLAGS", "Converted", "Left", "convert_script", "eval_overrides"]
