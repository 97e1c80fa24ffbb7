"""The policy: its checkpoint, tokenizer and engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rollfeed.config import EngineSettings, Purpose, Settings
from rollfeed.engine import DEFAULT_MODEL, TINY_MODEL, resolve_checkpoint
from rollfeed.engine.openai import OpenAIEngine
from rollfeed.engine.sglang import SGLangEngine
from rollfeed.errors import ConfigError
from rollfeed.prompts import load_tokenizer
from rollfeed.protocols import Engine, Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A checkpoint on this machine, with its tokenizer."""

    checkpoint: Path
    """Folder in Hugging Face layout."""
    tokenizer: Tokenizer
    template_date: str | None = None
    """What the chat template is told of the date, as ``model.template_date``; None where it does not ask."""


def load_model(
    checkpoint: str = DEFAULT_MODEL,
    *,
    trust_remote_code: bool = False,
    with_weights: bool = True,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    template_date: datetime | None = None,
) -> Model:
    """Find a checkpoint and load its tokenizer; the default model is converted on first use.

    Args:
        checkpoint: As ``model.checkpoint`` in a settings file.
        trust_remote_code: Let the tokenizer run code that comes with the checkpoint.
        with_weights: Whether they are needed here; servers have their own.
        chat_template_kwargs: Variables of the chat template.
        template_date: What a chat template is told that asks for the date; by default now.

    Raises:
        CheckpointError: If there is no such checkpoint, or it is of an unsupported kind.
        ConfigError: If a variable of the chat template is not to be set.
    """
    folder = resolve_checkpoint(checkpoint, with_weights=with_weights)
    tokenizer = load_tokenizer(
        folder,
        trust_remote_code=trust_remote_code,
        chat_template_kwargs=chat_template_kwargs,
        template_date=template_date,
    )
    told = tokenizer.template_date
    return Model(checkpoint=folder, tokenizer=tokenizer, template_date=None if told is None else told.isoformat())


def load_settings_model(settings: Settings) -> Model:
    """Find or make the model of a settings file; its weights need not be here where servers have them.

    Raises:
        CheckpointError: As :func:`load_model`.
    """
    checkpoint = settings.model.checkpoint
    if checkpoint == TINY_MODEL:
        # Imported here because it brings safetensors, which commands on servers do without.
        from rollfeed.engine.tiny import tiny_checkpoint

        checkpoint = str(tiny_checkpoint(settings.model.tiny, seed=settings.seed))
    # What trains asks for its weights where it begins; from a hub they come now or never.
    is_fetched = settings.trains and not Path(checkpoint).expanduser().exists()
    return load_model(
        checkpoint,
        trust_remote_code=settings.model.trust_remote_code,
        with_weights=settings.engine.is_embedded or is_fetched,
        chat_template_kwargs=settings.model.chat_template_kwargs,
        template_date=settings.model.template_datetime,
    )


def build_engine(model: Model, settings: EngineSettings | None = None, *, deterministic: bool = False) -> Engine:
    """Return the engine that the settings name, checked and not yet started.

    Raises:
        ConfigError: If the checkpoint cannot be served with these settings.
    """
    settings = settings or EngineSettings()
    if settings.openai is not None:
        return OpenAIEngine(
            settings.openai,
            context_length=settings.context_length,
            tokenizer=model.tokenizer,
            exact=settings.openai.purpose is Purpose.TRAINING,
            checkpoint=model.checkpoint,
        )
    if settings.sglang is None:
        return _embedded_engine(model, settings, deterministic=deterministic)
    return SGLangEngine(
        settings.sglang,
        context_length=settings.context_length,
        tokenizer=model.tokenizer,
        checkpoint=model.checkpoint,
    )


def _embedded_engine(model: Model, settings: EngineSettings, *, deterministic: bool) -> Engine:
    try:
        # Imported here because it brings torch, which other engines and commands do without.
        from rollfeed.engine.local import create_local_engine
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the embedded engine needs {error.name}, which is not installed: pip install 'rollfeed[local]'"
        ) from None
    return create_local_engine(
        checkpoint=model.checkpoint,
        tokenizer=model.tokenizer,
        deterministic=deterministic,
        **settings.model_dump(mode="json", exclude={"sglang", "openai"}),
    )
