"""The policy: its checkpoint, tokenizer and engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfeed.completions import LARGEST_VOCABULARY
from rollfeed.config import EngineSettings, LaunchSettings, Settings
from rollfeed.config.lora import LoraSettings
from rollfeed.config.model import ModelSettings
from rollfeed.config.paths import as_paths, expand_path
from rollfeed.config.pictures import PictureSettings
from rollfeed.config.servers import ServerSettings
from rollfeed.engine import DEFAULT_MODEL, TINY_MODEL, TINY_MOE_MODEL, TINY_VISION_MODEL, resolve_checkpoint
from rollfeed.engine.client import Dialect, ServerEngine
from rollfeed.engine.dialects import DIALECTS
from rollfeed.engine.embeddable import is_embeddable
from rollfeed.engine.idle import IdleEngine
from rollfeed.engine.launch import KINDS, LaunchedEngine, LaunchedModel, ServerLauncher, server_commands
from rollfeed.errors import CheckpointError, ConfigError
from rollfeed.model_files import find_config
from rollfeed.plugins import load_factory
from rollfeed.prompts import load_tokenizer
from rollfeed.prompts.pictures import ModelPictures, PictureLoader, takes_pictures
from rollfeed.prompts.pictures.picture_folder import SERVED_BYTES, PictureFolder
from rollfeed.protocols import (
    Engine,
    PictureInput,
    PictureLoading,
    PictureProcessor,
    Tokenizer,
    TransportContext,
    WeightTransport,
)
from rollfeed.store.layout import SERVERS
from rollfeed.types import Completion, Picture, SamplingParams
from rollfeed.weights import TRANSPORTS

_SERVED_NAME = "policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A checkpoint on this machine, with its tokenizer."""

    checkpoint: Path
    """Folder in Hugging Face layout."""
    tokenizer: Tokenizer
    trust_remote_code: bool = False
    """Whether code in the folder may be run."""
    template_date: str | None = None
    """What the chat template is told of the date, as ``model.template_date``; None where it does not ask."""
    store: PictureFolder = field(default_factory=PictureFolder)
    """Has the bytes of pictures."""
    loader: PictureLoading | None = None
    """Loads pictures into it."""
    pictures: PictureProcessor | None = None
    """Of the checkpoint; None where it takes none."""

    @property
    def picture_input(self) -> PictureInput | None:
        """The way of pictures into prompts."""
        return None if self.loader is None else PictureInput(self.loader, self.pictures)


def load_model(
    checkpoint: str = DEFAULT_MODEL,
    settings: ModelSettings | None = None,
    *,
    with_weights: bool = True,
    samples: bool = True,
    pictures: PictureSettings | None = None,
) -> Model:
    """Find a checkpoint and load its tokenizer; the default model is converted on first use.

    ``settings`` are what else there is in ``[model]``; servers have the weights themselves. ``samples`` is as of
    :func:`load_tokenizer`, and ``pictures`` bounds what is loaded of them.

    Raises:
        CheckpointError: If there is no such checkpoint, or it is of an unsupported kind.
        ConfigError: If a variable of the chat template is not to be set.
    """
    folder, settings = resolve_checkpoint(checkpoint, with_weights=with_weights), settings or ModelSettings()
    tokenizer = load_tokenizer(
        folder,
        trust_remote_code=settings.trust_remote_code,
        chat_template_kwargs=settings.chat_template_kwargs,
        chat_template=None if settings.chat_template is None else Path(settings.chat_template),
        template_date=settings.template_datetime,
        samples=samples,
    )
    told, store = tokenizer.template_date, PictureFolder()
    processor = ModelPictures(folder, store, trust_remote_code=settings.trust_remote_code)
    return Model(
        checkpoint=folder,
        tokenizer=tokenizer,
        trust_remote_code=settings.trust_remote_code,
        template_date=None if told is None else told.isoformat(),
        store=store,
        loader=PictureLoader(store, limits=pictures),
        pictures=processor if takes_pictures(folder) else None,
    )


def load_settings_model(settings: Settings, *, samples: bool = True) -> Model:
    """Find or make the model of a settings file; its weights need not be here where servers have them.

    Raises:
        CheckpointError: As :func:`load_model`.
    """
    checkpoint = _named_checkpoint(settings.model, settings.seed)
    # What trains asks for its weights where it begins; from a hub they come now or never.
    is_fetched = settings.trains and not Path(checkpoint).expanduser().exists()
    is_served = settings.engine.needs_weights and settings.needs_engine
    with_weights, bounds = is_served or is_fetched, settings.prompts.pictures
    return load_model(checkpoint, settings.model, with_weights=with_weights, samples=samples, pictures=bounds)


def load_model_tokenizer(settings: ModelSettings, *, seed: int) -> Tokenizer:
    """Load the tokenizer of a run's model, whose weights need not be here; ``seed`` is the run's. Nothing is fetched.

    Raises:
        CheckpointError: As :func:`load_model`, and if a model of the hub has not been fetched before.
    """
    checkpoint = _named_checkpoint(settings, seed)
    if checkpoint != DEFAULT_MODEL and not Path(expand_path(checkpoint)).exists():
        from huggingface_hub import snapshot_download  # slow to import, and needed for names of the hub only

        try:
            checkpoint = snapshot_download(checkpoint, local_files_only=True)
        except Exception as error:  # every way has the same meaning
            raise CheckpointError(f"model = {checkpoint!r}: is not on this machine") from error
    return load_model(checkpoint, settings, with_weights=False).tokenizer


def _named_checkpoint(settings: ModelSettings, seed: int) -> str:
    if settings.checkpoint not in (TINY_MODEL, TINY_MOE_MODEL, TINY_VISION_MODEL):
        return settings.checkpoint
    # Imported here because they bring safetensors, which commands on servers do without.
    from rollfeed.engine.tiny import tiny_checkpoint
    from rollfeed.engine.tiny_vision import tiny_vision_checkpoint

    if settings.checkpoint == TINY_VISION_MODEL:
        return str(tiny_vision_checkpoint(settings.tiny, seed=seed))
    return str(tiny_checkpoint(settings.tiny, seed=seed, has_experts=settings.checkpoint == TINY_MOE_MODEL))


def run_engine(model: Model, settings: Settings, *, folders: Sequence[Path] = (), starts: bool = True) -> Engine:
    """Return the engine of a run, not yet started; one without weights where nothing is sampled.

    That is so, too, where the run is only checked (``starts`` is False) and that needs no other.

    Raises:
        ConfigError: As :func:`build_engine`.
    """
    may_idle = not starts and settings.engine.is_embedded
    if settings.needs_engine and not (may_idle and is_embeddable(model.checkpoint, settings.engine)):
        return build_engine(
            model,
            settings.engine,
            deterministic=settings.rollout.deterministic,
            returns_experts=settings.sampling.return_routed_experts,
            folders=folders,
            lora=settings.train.lora,
        )
    return IdleEngine(context_length=settings.engine.context_length, vocab_size=vocab_size_of(model.checkpoint))


def build_engine(
    model: Model,
    settings: EngineSettings | None = None,
    *,
    deterministic: bool = False,
    returns_experts: bool = False,
    folders: Sequence[str | Path] = (),
    lora: LoraSettings | None = None,
) -> Engine:
    """Return the engine that the settings name, checked and not yet started.

    Modules of plug-ins are looked for in ``folders`` too; ``lora`` is what servers that are started may be given, and
    ``returns_experts`` whether they have to return experts.

    Raises:
        ConfigError: If the checkpoint cannot be served with these settings.
    """
    settings = settings or EngineSettings()
    for name, servers in settings.servers.items():
        make_engine: Callable[..., ServerEngine] = ServerEngine
        if settings.launch is not None:
            launcher = _launcher(model, settings, settings.launch, name, lora=lora, returns_experts=returns_experts)
            servers, make_engine = servers.at(launcher.addresses), partial(LaunchedEngine, launcher)
        dialect = DIALECTS[name](servers)
        return make_engine(
            dialect,
            context_length=settings.context_length,
            tokenizer=model.tokenizer,
            vocab_size=vocab_size_of(model.checkpoint),
            transport=_transport(model, servers, dialect, folders=as_paths(folders)),
            puts_back=not deterministic,
            pictures=model.pictures,
        )
    return _embedded_engine(model, settings, deterministic=deterministic)


def _launcher(model: Model, settings: EngineSettings, launch: LaunchSettings, kind: str, **told: Any) -> ServerLauncher:
    """Return what runs the servers of a table; they serve the policy's checkpoint."""
    name = None if settings.openai is None else settings.openai.model
    served = LaunchedModel(
        model.checkpoint,
        name=name or _SERVED_NAME,
        context_length=settings.context_length,
        trust_remote_code=model.trust_remote_code,
        weights_transport=settings.servers[kind].weights_transport,
        **told,
    )
    return ServerLauncher(server_commands(launch, KINDS[kind], served), launch)


def keep_server_logs(engine: Engine, folder: Path) -> None:
    """Have servers that an engine starts write their logs below a folder."""
    if isinstance(engine, LaunchedEngine):
        engine.launcher.log_folder = folder / SERVERS


def _transport(model: Model, servers: ServerSettings, dialect: Dialect, *, folders: Sequence[Path]) -> WeightTransport:
    folder = None if servers.weights_folder is None else Path(expand_path(servers.weights_folder))
    context = TransportContext(
        kind=dialect.setting.rpartition(".")[2],
        folder=folder,
        checkpoint=model.checkpoint,
        untied_head=dialect.untied_head,
        receivers=servers.weights_receivers,
        key=dialect.api_key.value,
    )
    return load_factory(
        TRANSPORTS.get(servers.weights_transport, servers.weights_transport),
        WeightTransport,
        context,
        key=f"{dialect.setting}.weights_transport",
        folders=folders,
    )


def vocab_size_of(checkpoint: Path) -> int:
    """Return how many ids a checkpoint's model has, as far as it tells."""
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
        pictures=model.pictures,
        **settings.model_dump(mode="json", exclude={*DIALECTS, "launch"}),
    )


class Endpoint:
    """A model behind an engine; ``async with`` starts and ends it. Fits :class:`rollfeed.protocols.TokenEndpoint`.

    Args:
        provider: ``embedded`` (this process), ``sglang`` or ``openai`` (servers such as vLLM).
        model: A checkpoint's folder or name, as ``model.checkpoint``; servers have its weights themselves.
        api_base: Address of the server.
        context_length: Tokens of a request, at most.
        api_key_env: The variable that has the server's key.

    Raises:
        ConfigError: If there is no such provider, it needs an address or takes none, or the model is not there.
    """

    def __init__(
        self,
        *,
        provider: str = "embedded",
        model: str,
        api_base: str | None = None,
        context_length: int = 4096,
        api_key_env: str | None = None,
    ) -> None:
        self._model = load_model(model, with_weights=provider == "embedded")
        self._settings = _engine_settings(provider, api_base, context_length=context_length, api_key_env=api_key_env)
        self._engine = build_engine(self._model, self._settings)
        self.context_length = context_length
        self._num_users = 0
        self._opening = asyncio.Lock()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._model.tokenizer

    @property
    def picture_input(self) -> PictureInput | None:
        """The way of pictures into prompts; None where the model takes none."""
        return self._model.picture_input if self._model.pictures is not None else None

    def keep_pictures(self, folder: Path | None) -> None:
        """Keep pictures that clients show from now on in a folder, without one the last of them."""
        if folder is None:
            self._model.store.max_temporary_bytes = SERVED_BYTES
        else:
            self._model.store.open(folder)

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    async def generate(
        self, token_ids: NDArray[np.int32], params: SamplingParams, *, request_id: str, images: Sequence[Picture] = ()
    ) -> Completion:
        return await self._engine.generate(token_ids, params, request_id=request_id, images=images)

    async def failed(self) -> None:
        """Raise EngineError when an engine of this process has failed, after which it answers nothing any more."""
        failing = getattr(self._engine, "failed", None)
        await (asyncio.Event().wait() if failing is None else failing())

    async def __aenter__(self) -> Endpoint:
        async with self._opening:
            if not self._num_users:
                await self._engine.__aenter__()
            self._num_users += 1
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        async with self._opening:
            self._num_users -= 1
            if not self._num_users:
                ended, self._engine = self._engine, build_engine(self._model, self._settings)
                await ended.__aexit__(*exc_info)


def _engine_settings(
    provider: str, api_base: str | None, *, context_length: int, api_key_env: str | None
) -> EngineSettings:
    about: dict[str, Any] = {} if api_key_env is None else {"api_key_env": api_key_env}
    if provider == "embedded":
        if api_base is not None:
            raise ConfigError("the embedded engine has no address: leave api_base out, or name another provider")
        return EngineSettings(context_length=context_length)
    if api_base is None:
        raise ConfigError(f"provider {provider!r} needs api_base, the address of a server")
    tables: dict[str, dict[str, Any]] = {"sglang": {"workers": [api_base]}, "openai": {"base_url": api_base}}
    if provider not in tables:
        raise ConfigError(f"there is no provider {provider!r}: embedded, sglang or openai")
    return EngineSettings.model_validate({"context_length": context_length, provider: {**tables[provider], **about}})
