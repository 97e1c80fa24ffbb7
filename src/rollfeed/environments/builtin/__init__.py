"""The environments that come with rollfeed.

They verify in the process that asks, not in a worker: this is the list of those that are trusted to be quick whatever a
response is.
"""

from rollfeed.environments.builtin.add_numbers import AddNumbers
from rollfeed.environments.builtin.calc_tool import CalcTool
from rollfeed.environments.builtin.close_brackets import CloseBrackets
from rollfeed.environments.builtin.compare_max import CompareMax
from rollfeed.environments.builtin.constrained_words import ConstrainedWords
from rollfeed.environments.builtin.copy_text import CopyText
from rollfeed.environments.builtin.count_dots import CountDots
from rollfeed.environments.builtin.count_symbol import CountSymbol
from rollfeed.environments.builtin.grid_walk import GridWalk
from rollfeed.environments.builtin.guess_number import GuessNumber
from rollfeed.environments.builtin.lookup_table import LookupTable
from rollfeed.environments.builtin.make_target import MakeTarget
from rollfeed.environments.builtin.mod_chain import ModChain
from rollfeed.environments.builtin.name_colour import NameColour
from rollfeed.environments.builtin.next_in_pattern import NextInPattern
from rollfeed.environments.builtin.reverse_text import ReverseText
from rollfeed.environments.builtin.sort_numbers import SortNumbers
from rollfeed.protocols import Environment

BUILTIN_ENVIRONMENTS: tuple[Environment, ...] = (
    AddNumbers(),
    CompareMax(),
    ConstrainedWords(),
    CopyText(),
    CountSymbol(),
    GuessNumber(),
    ReverseText(),
    SortNumbers(),
    NextInPattern(),
    ModChain(),
    MakeTarget(),
    LookupTable(),
    GridWalk(),
    CloseBrackets(),
    CalcTool(),
    NameColour(),
    CountDots(),
)
