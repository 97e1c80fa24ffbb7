"""Lints what a run directory or a file of samples holds, with the tokenizer and the model that it was made with."""

from rollfeed.app.lint.linting import lint

__all__ = ["lint"]
