"""Files of prompts: what a path means, and the rows there."""

from rollfeed.prompts.files.opening import PromptFile, open_prompt_file
from rollfeed.prompts.files.raw_rows import RawRow, missing_column

__all__ = ["PromptFile", "RawRow", "missing_column", "open_prompt_file"]
