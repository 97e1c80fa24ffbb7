"""The environments that come with rollfeed."""

from rollfeed.environments.builtin.add_numbers import AddNumbers
from rollfeed.environments.builtin.all import BUILTIN_ENVIRONMENTS
from rollfeed.environments.builtin.compare_max import CompareMax
from rollfeed.environments.builtin.constrained_words import ConstrainedWords
from rollfeed.environments.builtin.copy_text import CopyText
from rollfeed.environments.builtin.count_symbol import CountSymbol
from rollfeed.environments.builtin.reverse_text import ReverseText

__all__ = [
    "BUILTIN_ENVIRONMENTS",
    "AddNumbers",
    "CompareMax",
    "ConstrainedWords",
    "CopyText",
    "CountSymbol",
    "ReverseText",
]
