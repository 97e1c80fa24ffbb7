"""Prompts: data sets, mixtures of sources, tokenizers and chat templates."""

from rollfeed.prompts.adaptive_dataset import AdaptiveDatasetSource
from rollfeed.prompts.data_limit import DataLimit, data_limit
from rollfeed.prompts.dataset import DatasetSource, Learn, LoadedPrompts, RowCheck, load_prompts
from rollfeed.prompts.mixture import MixtureSource
from rollfeed.prompts.rows import ColumnKeys
from rollfeed.prompts.tokenizer import ChatRenderer, LocalTokenizer, load_tokenizer

__all__ = [
    "AdaptiveDatasetSource",
    "ChatRenderer",
    "ColumnKeys",
    "DataLimit",
    "DatasetSource",
    "Learn",
    "LoadedPrompts",
    "LocalTokenizer",
    "MixtureSource",
    "RowCheck",
    "data_limit",
    "load_prompts",
    "load_tokenizer",
]
