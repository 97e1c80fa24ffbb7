"""Digests: the journal has one of every file that is read again, and one of each of its own rows."""

from rollfeed.store.vouching.checked_files import CheckedFiles, settings_problem, settings_text
from rollfeed.store.vouching.growing import GrowingFiles, num_whole
from rollfeed.store.vouching.seals import OF_RUN, Rows, Vouched, vouched_by

__all__ = [
    "OF_RUN",
    "CheckedFiles",
    "GrowingFiles",
    "Rows",
    "Vouched",
    "num_whole",
    "settings_problem",
    "settings_text",
    "vouched_by",
]
