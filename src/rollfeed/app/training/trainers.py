"""From settings to the trainer of a run: in its process, in several of its host, or as an actor of its cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rollfeed.app.build import PreparedRun
from rollfeed.app.checks import load_loss_function
from rollfeed.app.training.checks import (
    check_published,
    check_schedule,
    check_trained_model,
    check_trained_prompts,
    check_training,
    tell_of_correction,
)
from rollfeed.app.training.directory import where_it_goes_on
from rollfeed.app.training.ranked_trainer import RankedTrainer
from rollfeed.app.training.remote_trainer import RemoteTrainer, RunTrainer
from rollfeed.app.training.trained_checkpoints import TrainedCheckpoints, trained_checkpoints
from rollfeed.batch import advantages_less_kl
from rollfeed.cluster import Hosting, wanted_of_nodes
from rollfeed.cluster.rank_group import RankGroup
from rollfeed.cluster.ray_hosting import TRAINER, RayHosting, Resources
from rollfeed.config import RolloutMode, Settings
from rollfeed.config.paths import expand_path
from rollfeed.config.train import TrainKind
from rollfeed.config.weights import ProofSettings
from rollfeed.protocols import PictureProcessor
from rollfeed.weights import ServingForm

if TYPE_CHECKING:
    from rollfeed.training.probe import TrainerProbes
    from rollfeed.training.ranks import Ranks
    from rollfeed.training.trainer import Trainer

_FACTORY = "rollfeed.app.inside_cluster.trainer_worker:TrainerWorker"
_RANK_FACTORY = "rollfeed.app.inside_cluster.rank_worker:RankWorker"
_MODULES = ("torch", "transformers", "safetensors")


def make_trainer(prepared: PreparedRun) -> Trainer:
    """Return the trainer of a run, as its checkpoint is.

    Raises:
        ConfigError: If the settings cannot be trained with.
        CheckpointError: If the model cannot be loaded.
    """
    settings, serving = prepared.settings, prepared.model.checkpoint
    checkpoints = _checked(prepared)
    return load_trainer(
        settings,
        serving=serving,
        checkpoints=checkpoints,
        num_batches=prepared.num_batches,
        pictures=prepared.model.pictures,
        folders=prepared.spec.folders,
    )


def load_trainer(
    settings: Settings,
    *,
    serving: Path,
    num_batches: int,
    checkpoints: TrainedCheckpoints | None = None,
    pictures: PictureProcessor | None = None,
    ranks: Ranks | None = None,
    folders: Sequence[Path] = (),
) -> Trainer:
    """Return a trainer for settings that have been checked; raises as :func:`make_trainer`.

    Args:
        settings: Of the run.
        serving: The folder of ``model.checkpoint``.
        num_batches: Of the whole run.
        checkpoints: What training begins with; found anew by default.
        pictures: The model's processor of these, if it has one.
        ranks: Those that train together; by default this process alone.
        folders: Where the module of ``train.loss.function`` is looked for.
    """
    # PyTorch takes seconds to import.
    from rollfeed.training.preferences.reward_model import RewardModelTrainer
    from rollfeed.training.trainer import Trainer

    start, reference = checkpoints or trained_checkpoints(settings, serving)
    train = settings.train
    if settings.sampling.restrictions and not settings.sampling.return_sampling_mask:
        # The engine's probabilities are then of another distribution, whatever it has seen.
        train = train.model_copy(update={"max_picture_mismatch_kl": 0.0})
    reward_key, less_kl = settings.reward.reward_key, None
    if train.loss.reward_kl_coefficient:
        less_kl = partial(advantages_less_kl, settings=settings.advantage, reward_key=reward_key)
    make: type[Trainer] = Trainer
    if train.kind is TrainKind.REWARD_MODEL:
        make = RewardModelTrainer
    trainer = make(
        start,
        reference=reference,
        settings=train,
        temperature=1.0 if settings.rollout.mode is RolloutMode.SFT else settings.sampling.rollout_temperature,
        num_batches=num_batches,
        max_response_length=settings.sampling.rollout_max_response_len,
        trust_remote_code=settings.model.trust_remote_code,
        pictures=pictures,
        loss_function=load_loss_function(train.loss.function, folders=folders),
        advantages_less_kl=less_kl,
        **({} if ranks is None else {"ranks": ranks}),
    )
    if ranks is None:
        check_published(trainer.weights(), settings, serving)
    return trainer


@asynccontextmanager
async def trainer_of(prepared: PreparedRun, out: Path, hosting: Hosting | None = None) -> AsyncIterator[RunTrainer]:
    """Make the trainer of a run where ``[cluster]`` has it, and end it.

    Args:
        prepared: The run.
        out: Its directory.
        hosting: Where an actor is; by default on a node of the cluster.

    Raises:
        ConfigError: As :func:`make_trainer`, and if there is no such cluster or no node that can be used.
        RunFailedError: If no node has room for it.
    """
    settings, cluster = prepared.settings, prepared.settings.cluster
    if settings.train.num_processes > 1:
        async with _ranked_trainer(prepared, out) as ranked:
            yield ranked
        return
    if not cluster.has_trainer_actor:
        yield await asyncio.to_thread(make_trainer, prepared)
        return
    checkpoints = await asyncio.to_thread(_checked, prepared)
    hosting = hosting or RayHosting(
        cluster,
        needs=wanted_of_nodes(modules=_MODULES, folders=_folders(settings)),
        per_worker=Resources(cluster.trainer_cpus, _gpus(settings)),
        what=TRAINER,
    )
    async with hosting:
        await hosting.reserve(1)
        host = await hosting.start(_FACTORY, settings, prepared.num_batches, prepared.spec.folders, place=0)
        trainer = RemoteTrainer(host, checkpoint=checkpoints.start, where_it_goes_on=lambda: where_it_goes_on(out))
        await trainer.call("open")
        yield trainer


@asynccontextmanager
async def _ranked_trainer(prepared: PreparedRun, out: Path) -> AsyncIterator[RankedTrainer]:
    settings, servers = prepared.settings, prepared.settings.policy_servers
    checkpoints = await asyncio.to_thread(_checked, prepared)
    count, folders = settings.train.num_processes, prepared.spec.folders
    timeout = settings.train.process_timeout_seconds
    group = RankGroup(count, _RANK_FACTORY, settings, prepared.num_batches, folders, timeout_seconds=timeout)
    async with group:
        trainer = RankedTrainer(
            group,
            checkpoint=checkpoints.start,
            where_it_goes_on=lambda: where_it_goes_on(out),
            has_adapter=settings.train.lora is not None,
            publishes_adapter=servers is not None and servers.weights_transport == "adapter",
        )
        try:
            await trainer.call("open")
            yield trainer
        finally:
            trainer.close()


def probes_of(settings: Settings, trainer: Trainer, *, checkpoint: Path, precision: str) -> TrainerProbes:
    """Return what scores texts with the trainer's weights as an engine holds them.

    Args:
        settings: Of the run.
        trainer: Whose weights they are.
        checkpoint: That the engine serves.
        precision: Of the engine.
    """
    # PyTorch takes seconds to import, and the trainer has.
    from rollfeed.engine.backends.native.places import quantised
    from rollfeed.training.probe import FP8, TrainerProbes, weight_types

    is_embedded = settings.engine.is_embedded and settings.needs_engine
    types = weight_types(checkpoint, precision=precision, is_embedded=is_embedded)
    return TrainerProbes(
        trainer,
        settings=settings.weights.proof if settings.needs_engine else ProofSettings(num_texts=0),
        types=types,
        micro_batch_tokens=settings.train.micro_batch_tokens,
        to_int8=quantised,
        to_fp8=ServingForm(checkpoint).rounded if FP8 in types else None,
        merges=all(each.weights_transport != "adapter" for each in settings.engine.servers.values()),
    )


def _checked(prepared: PreparedRun) -> TrainedCheckpoints:
    settings = prepared.settings
    check_training(settings)
    check_schedule(settings, prepared.num_batches)
    tell_of_correction(settings)
    found = trained_checkpoints(settings, prepared.model.checkpoint)
    check_trained_model(settings, found.start)
    takes_pictures = prepared.model.pictures is not None
    check_trained_prompts(settings, prepared.dataset_prompts, found.start, takes_pictures=takes_pictures)
    return found


def _gpus(settings: Settings) -> float | None:
    """Return how many of Ray's GPUs the trainer gets; None for one where nodes have some."""
    given, device = settings.cluster.trainer_gpus, settings.train.device
    if given is not None or device == "auto":
        return given
    return float(device.startswith("cuda"))


def _folders(settings: Settings) -> tuple[str, ...]:
    """Return the models that are named by their folders."""
    names = (settings.model.checkpoint, settings.train.checkpoint, settings.train.loss.reference_checkpoint)
    named = [Path(expand_path(name)) for name in names if name is not None]
    return tuple(str(path) for path in named if path.is_absolute() and path.is_dir())
