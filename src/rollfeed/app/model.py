"""The policy: its checkpoint, tokenizer and engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rollfeed.completions import LARGEST_VOCABULARY
from rollfeed.config import EngineSettings, Settings
from rollfeed.config.model import ModelSettings
from rollfeed.config.paths import expand_path
from rollfeed.engine import DEFAULT_MODEL, TINY_MODEL, resolve_checkpoint
from rollfeed.engine.client import ServerEngine
from rollfeed.engine.dialects import DIALECTS
from rollfeed.engine.idle import IdleEngine
from rollfeed.errors import ConfigError
from rollfeed.model_files import find_config
from rollfeed.prompts import load_tokenizer
from rollfeed.protocols import Engine, Tokenizer
from rollfeed.weights import TRANSPORTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A checkpoint on this machine, with its tokenizer."""

    checkpoint: Path
    """Folder in Hugging Face layout."""
    tokenizer: Tokenizer
    template_date: str | None = None
    """What the chat template is told of the date, as ``model.template_date``; None where it does not ask."""


def load_model(
    checkpoint: str = DEFAULT_MODEL, settings: ModelSettings | None = None, *, with_weights: bool = True
) -> Model:
    """Find a checkpoint and load its tokenizer; the default model is converted on first use.

    Args:
        checkpoint: As ``model.checkpoint`` in a settings file.
        settings: What else there is in ``[model]``.
        with_weights: Whether they are needed here; servers have their own.

    Raises:
        CheckpointError: If there is no such checkpoint, or it is of an unsupported kind.
        ConfigError: If a variable of the chat template is not to be set.
    """
    folder, settings = resolve_checkpoint(checkpoint, with_weights=with_weights), settings or ModelSettings()
    tokenizer = load_tokenizer(
        folder,
        trust_remote_code=settings.trust_remote_code,
        chat_template_kwargs=settings.chat_template_kwargs,
        template_date=settings.template_datetime,
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
    is_served = settings.engine.is_embedded and settings.needs_engine
    return load_model(checkpoint, settings.model, with_weights=is_served or is_fetched)


def run_engine(model: Model, settings: Settings) -> Engine:
    """Return the engine of a run, not yet started; one without weights where nothing is sampled.

    Raises:
        ConfigError: As :func:`build_engine`.
    """
    if settings.needs_engine:
        return build_engine(model, settings.engine, deterministic=settings.rollout.deterministic)
    return IdleEngine(context_length=settings.engine.context_length, vocab_size=_vocab_size(model.checkpoint))


def build_engine(model: Model, settings: EngineSettings | None = None, *, deterministic: bool = False) -> Engine:
    """Return the engine that the settings name, checked and not yet started.

    Raises:
        ConfigError: If the checkpoint cannot be served with these settings.
    """
    settings = settings or EngineSettings()
    for name, make_dialect in DIALECTS.items():
        if (servers := getattr(settings, name)) is not None:
            dialect = make_dialect(servers)
            folder = None if servers.weights_folder is None else Path(expand_path(servers.weights_folder))
            return ServerEngine(
                dialect,
                context_length=settings.context_length,
                tokenizer=model.tokenizer,
                vocab_size=_vocab_size(model.checkpoint),
                transport=TRANSPORTS["disk"](folder, checkpoint=model.checkpoint, untied_head=dialect.untied_head),
            )
    return _embedded_engine(model, settings, deterministic=deterministic)


def _vocab_size(checkpoint: Path) -> int:
    config = find_config(checkpoint) or {}
    sections = (section for section in (config, config.get("text_config")) if isinstance(section, dict))
    told = (section.get("vocab_size") for section in sections)
    return next((value for value in told if type(value) is int and value > 0), LARGEST_VOCABULARY)


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
