"""Prompts: data sets, mixtures of sources, tokenizers and chat templates."""

from rollfeed.prompts.data_limit import DataLimit, data_limit
from rollfeed.prompts.dataset import DatasetSource
from rollfeed.prompts.mixture import MixtureSource
from rollfeed.prompts.renderer import ChatRenderer
from rollfeed.prompts.rows import ColumnKeys
from rollfeed.prompts.tokenizer import LocalTokenizer, load_tokenizer

__all__ = [
    "ChatRenderer",
    "ColumnKeys",
    "DataLimit",
    "DatasetSource",
    "LocalTokenizer",
    "MixtureSource",
    "data_limit",
    "load_tokenizer",
]
