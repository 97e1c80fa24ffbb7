"""What can be known of training before there is a batch."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

from rollfeed.app.build import PreparedRun
from rollfeed.app.training.checkpoints import has_steps, newest_checkpoint
from rollfeed.config import RunSpec, Settings
from rollfeed.config.advantage import AdvantageEstimator
from rollfeed.config.rollout import RolloutMode
from rollfeed.config.train import Correction, OldLogprobs
from rollfeed.errors import CheckpointError, ConfigError
from rollfeed.model_files import find_config, has_weights
from rollfeed.prompts import MixtureSource
from rollfeed.store import RunDirectory, RunReader, RunStatus
from rollfeed.store.layout import holds_training
from rollfeed.types import TrainBatch

_log = logging.getLogger(__name__)

_ONE_TOKEN = 1e-7
"""The likeliest token has more, in any vocabulary: nucleus sampling keeps it alone."""


def directory_problem(spec: RunSpec, out: Path, *, overwrite: bool) -> str | None:
    """Return why training can neither begin nor go on in a directory; None if it can. Nothing is changed.

    A finished training goes on when ``rollout.num_rollout`` is larger than it was.
    """
    settings, newest = spec.settings, None if overwrite else newest_checkpoint(out)
    if newest is not None and (problem := _finished_problem(settings, out, newest)):
        return problem
    step = newest if newest is not None and newest + 1 < settings.rollout.num_rollout else None
    identity = settings.identity()
    problem = RunDirectory.problem(out, identity=identity, overwrite=overwrite, step=step, chosen=spec.chosen)
    if problem is None and not overwrite and not holds_training(out) and has_steps(out):
        return (
            f"{out}: holds a run that was not trained on; go on with rollfeed run --resume {out}, choose another "
            "--out, or replace it with --overwrite"
        )
    return problem


def _finished_problem(settings: Settings, out: Path, newest: int) -> str | None:
    """Return why a training whose newest checkpoint is that after batch ``newest`` has nothing left to do."""
    with RunReader(out) as reader:
        run = reader.run()
    if run.status is not RunStatus.FINISHED:
        return None
    has, remedy = f"{out}: holds a finished training of {newest + 1} batches", "rollout.num_rollout"
    if newest + 1 < settings.rollout.num_rollout:
        # Of a prompt source of the user's nobody knows whether there is more by now.
        stored = run.settings.get("prompts", {}).get("num_epoch")
        if not run.cause or settings.plugins.prompt_source or stored != settings.prompts.num_epoch:
            return None
        has, remedy = f"{has} ({run.cause})", "prompts.num_epoch"
    return f"{has}; raise {remedy} to train on, choose another --out, or replace it with --overwrite"


def check_training(settings: Settings) -> None:
    """Refuse settings with which a batch could not be trained on, before there is one.

    Raises:
        ConfigError: If a batch has fewer groups than mini-batches, every advantage would be 0, ratios would be of two
            distributions, the longest sample that may come is over ``train.micro_batch_tokens``, or there is no such
            device.
    """
    missing = [name for name in ("torch", "safetensors") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"training needs {' and '.join(missing)}, which is not installed: pip install 'rollfeed[train]'"
        )
    train, num_groups = settings.train, settings.rollout.rollout_batch_size
    if train.num_minibatches > num_groups:
        raise ConfigError(
            f"train.num_minibatches = {train.num_minibatches}: a batch of rollout.rollout_batch_size = {num_groups} "
            "groups cannot be split into as many; lower it, or raise the latter"
        )
    _check_that_it_can_learn(settings)
    _check_ratios(settings)
    _check_memory(settings)
    if train.device not in ("auto", "cpu"):
        # PyTorch takes seconds to import.
        from rollfeed.training.model import choose_device

        choose_device(train.device)


def check_trained_prompts(prepared: PreparedRun) -> None:
    """Refuse prompts of which no sample could be trained on, whatever engine answers them.

    Raises:
        ConfigError: If one has images, or a sample of the longest may have more tokens than the model takes.
    """
    settings, source = prepared.settings, prepared.source
    own = settings.plugins
    prompts = source.dataset_prompts if isinstance(source, MixtureSource) else ()
    shown = next((prompt for prompt in prompts if prompt.images), None)
    if shown is not None and not (own.generate or own.rollout or own.sample_hook):
        raise ConfigError(
            f"prompts.datasets: {shown.prompt_id} has images, and the trainer takes text only: remove image_key, or "
            "use rollfeed run with a trainer of your own"
        )
    limit = (find_config(prepared.model.checkpoint) or {}).get("max_position_embeddings")
    longest = settings.max_context_length
    if not (own.prompt_source or own.generate or own.rollout):
        longest = settings.max_prompt_length + settings.sampling.rollout_max_response_len
    if isinstance(limit, int) and longest - 1 > limit:
        raise ConfigError(
            f"samples of {longest} tokens are allowed, and the model that is trained takes at most {limit}: lower "
            "engine.context_length, or prompts.rollout_max_prompt_len"
        )


def _check_that_it_can_learn(settings: Settings) -> None:
    """Refuse settings under which every advantage is 0, or the gradient of every group.

    Functions of the user's that make groups or advantages may make others than the built-in ones, so they are trusted.
    """
    own, rollout, estimator = settings.plugins, settings.rollout, settings.advantage.estimator
    if own.generate or own.rollout or own.advantage:
        return
    num_samples = rollout.n_samples_per_prompt
    is_alone = estimator is AdvantageEstimator.REINFORCE_PP and num_samples * rollout.rollout_batch_size == 1
    if is_alone or (num_samples == 1 and estimator is not AdvantageEstimator.REINFORCE_PP):
        others = "prompt" if not is_alone else "batch"
        raise ConfigError(
            f"rollout.n_samples_per_prompt = {num_samples}: advantage.estimator = {estimator.value!r} compares the "
            f"answers of one {others} with each other, and one alone teaches nothing: raise it"
            + ("" if is_alone else ", or set advantage.estimator = 'reinforce_pp'")
        )
    top_k, top_p = settings.sampling.rollout_top_k, settings.sampling.rollout_top_p
    if (top_k == 1 or top_p <= _ONE_TOKEN) and estimator is not AdvantageEstimator.REINFORCE_PP:
        name, off = (f"rollout_top_k = {top_k}", -1) if top_k == 1 else (f"rollout_top_p = {top_p}", 1)
        raise ConfigError(
            f"sampling.{name}: all answers to a prompt are the same, and teach nothing: raise it, or set {off}"
        )


def _check_ratios(settings: Settings) -> None:
    """Refuse ratios of the trainer's to the engine's probabilities where those are of another distribution."""
    loss, restrictions = settings.train.loss, settings.sampling.restrictions
    if not restrictions:
        return
    asked = None
    if loss.correction is not Correction.NONE:
        asked = f"correction = {loss.correction.value!r}"
    elif loss.old_logprobs is OldLogprobs.ROLLOUT:
        asked = f"old_logprobs = {loss.old_logprobs.value!r}"
    if asked is not None:
        raise ConfigError(
            f"train.loss.{asked}: with {', '.join(restrictions)} the engine draws from another distribution than the "
            "model's, which the trainer computes, so that their ratio is not 1 for equal weights: leave it out, or set "
            f"{' and '.join(restriction.partition(' ')[0] for restriction in restrictions)} back"
        )


def tell_of_correction(settings: Settings) -> None:
    """Log what becomes of the difference between engine and trainer, where it is not plain on-policy training."""
    loss, mode, restrictions = settings.train.loss, settings.rollout.mode, settings.sampling.restrictions
    if restrictions:
        _log.warning(
            "%s: the engine draws from another distribution than the trainer computes: train.loss.correction is off, "
            "and train/mismatch_* count that difference too",
            ", ".join(restrictions),
        )
    elif mode is not RolloutMode.SYNC and loss.correction is not Correction.NONE:
        _log.info(
            "rollout.mode = %s: tokens weigh what the trainer's probability is over the engine's, at most %g "
            "(train.loss.correction = '%s')",
            mode.value,
            loss.correction_high,
            loss.correction.value,
        )


def check_sampling_masks(batch: TrainBatch) -> None:
    """Refuse samples that do not say what their tokens were drawn from, where engines are asked for it.

    Raises:
        ConfigError: With the first one.
    """
    for sample in batch.samples:
        if sample.sampling_mask is None and sample.loss_mask.any():
            raise ConfigError(
                f"sample {sample.index} has no sampling_mask, which sampling.return_sampling_mask asks for: have "
                "plugins.generate keep it, or set it to false"
            )


def check_trained_model(settings: Settings, checkpoint: Path) -> None:
    """Refuse a model that cannot be trained, from its configuration and the headers of its weight files.

    Raises:
        CheckpointError: If weights are missing, not whole, or not the model's.
    """
    if not has_weights(checkpoint):
        raise CheckpointError(
            f"{checkpoint}: no weights, and training needs them here, also where servers generate: put the model's "
            "*.safetensors and config.json there"
        )
    if settings.engine.is_embedded:
        return  # the engine has looked
    # It brings PyTorch, which takes seconds to import.
    import torch

    from rollfeed.model_files.loading import check_model
    from rollfeed.model_files.trial import is_small, load_tried

    trust = settings.model.trust_remote_code
    if is_small(checkpoint):
        load_tried(checkpoint, dtype=torch.float32, generates=False, trust_remote_code=trust)
    else:
        check_model(checkpoint, trust_remote_code=trust)


def _check_memory(settings: Settings) -> None:
    prompt, response = settings.max_prompt_length, settings.sampling.rollout_max_response_len
    longest, budget = prompt + response, settings.train.micro_batch_tokens
    what = f"a prompt of {prompt} and a response of {response} tokens are allowed"
    remedy = "prompts.rollout_max_prompt_len or sampling.rollout_max_response_len"
    own = settings.plugins
    if own.prompt_source or own.generate or own.rollout:
        # They may draw the line between prompt and response elsewhere.
        longest, remedy = settings.max_context_length, "sampling.rollout_max_context_len"
        what = f"samples of {longest} tokens are allowed"
    # The last token is no input: nothing behind it is predicted.
    if longest - 1 > budget:
        raise ConfigError(
            f"train.micro_batch_tokens = {budget}: {what} and would not fit; raise it to "
            f"{longest - 1}, or lower {remedy}"
        )
