"""Prompts: data sets, mixtures of sources, tokenizers and chat templates."""

from rollfeed.prompts.dataset import DatasetSource
from rollfeed.prompts.mixture import MixtureSource
from rollfeed.prompts.renderer import ChatRenderer
from rollfeed.prompts.rows import ColumnKeys
from rollfeed.prompts.tokenizer import LocalTokenizer, load_tokenizer

__all__ = ["ChatRenderer", "ColumnKeys", "DatasetSource", "LocalTokenizer", "MixtureSource", "load_tokenizer"]
