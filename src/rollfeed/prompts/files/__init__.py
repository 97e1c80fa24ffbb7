"""Files of prompts: what a path means, and the rows there."""

from rollfeed.prompts.files.opening import KINDS, PromptFile, open_prompt_file
from rollfeed.prompts.files.raw_rows import RawRow, missing_column
from rollfeed.prompts.files.text_files import COMPRESSIONS

__all__ = ["COMPRESSIONS", "KINDS", "PromptFile", "RawRow", "missing_column", "open_prompt_file"]
