"""The checkpoints beside the serving one: what training begins with, and what divergence is measured from."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from rollfeed.app.model import vocab_size_of
from rollfeed.config import Settings
from rollfeed.engine import resolve_checkpoint
from rollfeed.engine.checkpoint import token_ids_of
from rollfeed.errors import CheckpointError, ConfigError
from rollfeed.model_files import find_config, has_weights, read_headers
from rollfeed.weights import TRANSPORTS, ServingForm


class TrainedCheckpoints(NamedTuple):
    """Folders in Hugging Face layout."""

    start: Path
    """What training begins with."""
    reference: Path | None
    """What divergence is measured from; None for what training begins with, or where none is penalised."""


def trained_checkpoints(settings: Settings, serving: Path) -> TrainedCheckpoints:
    """Find the checkpoints of a training; hub names are downloaded, GGUF files converted.

    Raises:
        ConfigError: If weights could not be proven to have arrived.
        CheckpointError: If one is not there or quantised, is not of the model that ``serving`` is, or weights cannot be
            published in the form of that.
    """
    named = {"train.checkpoint": settings.train.checkpoint}
    if settings.train.loss.has_reference:
        named["train.loss.reference_checkpoint"] = settings.train.loss.reference_checkpoint
    found = {key: _found(key, name, settings, serving) for key, name in named.items() if name is not None}
    start, reference = found.get("train.checkpoint", serving), found.get("train.loss.reference_checkpoint")
    if (find_config(start) or {}).get("quantization_config"):
        raise CheckpointError(
            f"{start}: its weights are quantised, and cannot be trained: set train.checkpoint to the same model in BF16"
        )
    if reference is not None and settings.train.loss.reference_refresh_interval:
        _check_refreshed(start, reference)
    servers = settings.policy_servers
    is_proven = servers is not None and settings.weights.proof.num_texts != 0
    train, is_quantised = settings.train, bool((find_config(serving) or {}).get("quantization_config"))
    if (train.num_processes > 1 or train.lora is not None) and is_proven and is_quantised:
        what = "lora" if train.lora is not None else f"num_processes = {train.num_processes}"
        raise ConfigError(
            f"train.{what}: that servers of a checkpoint in FP8 have new weights is proven by one process only, and of "
            "weights without an adapter: set weights.proof.num_texts = 0"
        )
    if servers is not None and servers.weights_transport in TRANSPORTS:
        form = ServingForm(serving)
        # The others fuse and split what they are given, and are checked with the trainer's own tensors.
        if start != serving and servers.weights_transport in ("disk", "delta"):
            _check_shapes(form, start, serving)
    return TrainedCheckpoints(start, reference)


def _found(key: str, name: str, settings: Settings, serving: Path) -> Path:
    if name == settings.model.checkpoint:
        return serving
    try:
        folder = resolve_checkpoint(name)
        if (find_config(folder) or {}).get("quantization_config"):
            raise CheckpointError(f"{folder}: its weights are quantised: give the same model in BF16")
        ours, theirs = (token_ids_of(each) for each in (folder, serving))
        if (ours and theirs and ours != theirs) or vocab_size_of(folder) != vocab_size_of(serving):
            raise CheckpointError(f"{folder}: its tokens are not those of model.checkpoint ({serving})")
    except CheckpointError as error:
        raise CheckpointError(f"{key}: {error}") from None
    return folder


def _check_refreshed(start: Path, reference: Path) -> None:
    """Refuse a reference that cannot take the weights of what is trained."""
    ours, theirs = ({name: each.shape for name, each in read_headers(folder).items()} for folder in (start, reference))
    if other := sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)):
        raise CheckpointError(
            f"train.loss.reference_checkpoint: {reference}: its weight {other[0]!r} is not that of what is trained "
            f"({start}), whose weights train.loss.reference_refresh_interval gives it: set that to 0, or name a model "
            "of the same shape"
        )


def _check_shapes(form: ServingForm, start: Path, serving: Path) -> None:
    """Refuse a model with tensors that the serving one has not, or in other shapes."""
    if not has_weights(serving):
        return
    for name, header in read_headers(start).items():
        there = form.stored.get(name)
        if there is not None and there.shape != header.shape:
            raise CheckpointError(
                f"train.checkpoint: {start}: weight {name!r} has the shape {header.shape}, and in model.checkpoint "
                f"({serving}) {there.shape}: give the same model in another precision"
            )
        if there is None and not name.endswith(("lm_head.weight", "rotary_emb.inv_freq")):
            raise CheckpointError(
                f"train.checkpoint: {start}: weight {name!r} is not in model.checkpoint ({serving}): give the same "
                "model in another precision"
            )
