"""Checks a training before there is a batch, and batches before they are trained on."""

from __future__ import annotations

import importlib.util
import logging
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rollfeed.config import RolloutMode, Settings
from rollfeed.config.advantage import AdvantageEstimator
from rollfeed.config.optimizer import LearningRateSchedule
from rollfeed.config.teacher import TeacherUse
from rollfeed.config.train import Correction, OldLogprobs, TrainKind
from rollfeed.engine import TINY_MODEL, TINY_MOE_MODEL
from rollfeed.engine.launch import KINDS
from rollfeed.errors import CheckpointError, ConfigError, in_one_line
from rollfeed.model_files import find_config, has_weights
from rollfeed.types import Prompt, TrainBatch
from rollfeed.weights import ServingForm, served_tensors

_log = logging.getLogger(__name__)

_ONE_TOKEN = 1e-7
"""The likeliest token has more, in any vocabulary: nucleus sampling keeps it alone."""


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
    _check_reward_kl(settings)
    _check_memory(settings)
    check_ranks(settings)
    if train.device not in ("auto", "cpu"):
        # PyTorch takes seconds to import.
        from rollfeed.training.model import choose_device

        choose_device(train.device)


def check_schedule(settings: Settings, num_batches: int) -> None:
    """Raise ConfigError where the learning rate is 0 before the last of ``num_batches``."""
    optimizer = settings.train.optimizer
    falls_to_0 = optimizer.schedule is not LearningRateSchedule.CONSTANT and optimizer.final_learning_rate_ratio == 0
    if optimizer.decay_batches is not None and optimizer.decay_batches < num_batches and falls_to_0:
        raise ConfigError(
            f"train.optimizer.decay_batches = {optimizer.decay_batches}: the learning rate is 0 after these, and the "
            f"run has {num_batches}: raise it, or final_learning_rate_ratio"
        )


def check_published(tensors: Mapping[str, Any], settings: Settings, checkpoint: Path) -> None:
    """Refuse a trainer whose tensors servers of a checkpoint could not take, before anything is sampled.

    Raises:
        CheckpointError: If a name or a shape does not fit, or some are missing.
    """
    servers = settings.policy_servers
    if servers is not None and servers.weights_transport in ("tensors", "nccl") and has_weights(checkpoint):
        form = ServingForm(checkpoint)
        form.headers(served_tensors(tensors, form.stored, tied_head=form.is_tied))


def check_ranks(settings: Settings) -> None:
    """Raise ConfigError where several processes cannot train what they should, or there are too few GPUs for them."""
    train, launch = settings.train, settings.engine.launch
    count, what = train.num_processes, f"train.num_processes = {train.num_processes}"
    if count == 1:
        return
    _check_functions(settings, what)
    if train.kind is TrainKind.REWARD_MODEL:
        raise ConfigError(f"{what}: reward models are trained by one process: set it to 1")
    if settings.cluster.has_trainer_actor:
        raise ConfigError(f"{what}: the processes are those of this host: set cluster.trainer = 'driver'")
    servers = settings.policy_servers
    if servers is not None and servers.weights_transport in ("tensors", "nccl"):
        raise ConfigError(
            f"{what}: no process has all weights on its GPU, so that servers read them from files: set "
            'weights_transport = "disk", with weights_folder = "/dev/shm/weights" for files of memory, or "delta"'
        )
    if train.device == "cpu":
        return
    # PyTorch takes seconds to import.
    import torch

    there, first = torch.cuda.device_count(), torch.device(train.device).index or 0 if train.device != "auto" else 0
    if there == 0 and train.device == "auto":
        return
    if first + count > there:
        raise ConfigError(
            f"{what}: each process takes a GPU, from {first} on, and this process sees {there}: lower it, or set "
            "train.device = 'cpu'"
        )
    if launch is not None and not launch.colocate:
        each = launch.gpus or [range(launch.num_servers * (launch.gpus_per_server or 1))]
        if both := sorted({gpu for group in each for gpu in group} & set(range(first, first + count))):
            raise ConfigError(
                f"{what}: GPU {both[0]} is a server's as well: set engine.launch.gpus or train.device = 'cuda:N', the "
                "first GPU of the trainer, so that each has its own, or engine.launch.colocate = true"
            )


def _check_functions(settings: Settings, what: str) -> None:
    """Refuse functions that other processes cannot import, where the library is used directly."""
    try:
        problem = "it is the main program's" if b"__main__" in pickle.dumps(settings) else None
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        problem = in_one_line(error)
    if problem is not None:
        raise ConfigError(
            f"{what}: each process imports the functions of the settings, and cannot import one ({problem}): put it "
            "into a module, and name it 'module:name' or 'file.py:name'"
        )


def check_trained_prompts(
    settings: Settings, prompts: Iterable[Prompt], checkpoint: Path, *, takes_pictures: bool
) -> None:
    """Refuse prompts of which no sample could be trained on, whatever engine answers them.

    Args:
        settings: Of the run.
        prompts: Of its data sets.
        checkpoint: That is trained.
        takes_pictures: Whether its model has a processor of pictures.

    Raises:
        ConfigError: If one has pictures that the trainer cannot see, or a sample of the longest may have more tokens
            than the model takes.
    """
    own = settings.plugins
    shown = next((prompt for prompt in prompts if prompt.images), None)
    if shown is not None and settings.cluster.has_trainer_actor:
        raise ConfigError(
            f"prompts.datasets: {shown.prompt_id} has images, which a trainer on another node does not have: set "
            "cluster.trainer = 'driver'"
        )
    if shown is not None and settings.train.num_processes > 1:
        raise ConfigError(
            f"prompts.datasets: {shown.prompt_id} has images, which several processes are not trained on: set "
            "train.num_processes = 1"
        )
    if shown is not None and not takes_pictures and not (own.generate or own.rollout or own.sample_hook):
        raise ConfigError(
            f"prompts.datasets: {shown.prompt_id} has images, and the model that is trained takes text only: remove "
            "image_key, or use a model that sees"
        )
    config = find_config(checkpoint) or {}
    text = config.get("text_config")
    limit = config.get(
        "max_position_embeddings", text.get("max_position_embeddings") if isinstance(text, dict) else None
    )
    longest, is_sft = settings.max_context_length, settings.rollout.mode is RolloutMode.SFT
    if not (own.prompt_source or own.generate or own.rollout):
        longest = settings.max_sample_length
    if isinstance(limit, int) and longest - 1 > limit:
        raise ConfigError(
            f"samples of {longest} tokens are allowed, and the model that is trained takes at most {limit}: lower "
            f"engine.context_length{'' if is_sft else ', or prompts.rollout_max_prompt_len'}"
        )


def _check_that_it_can_learn(settings: Settings) -> None:
    """Refuse settings under which every advantage is 0, or the gradient of every group.

    Functions of the user's that make groups or advantages may make others than the built-in ones, so they are trusted.
    """
    own, rollout, estimator = settings.plugins, settings.rollout, settings.advantage.estimator
    is_taught = settings.teacher is not None and settings.teacher.use is TeacherUse.LOSS
    is_own_loss = settings.train.loss.function is not None
    if own.generate or own.rollout or own.advantage or is_taught or is_own_loss or rollout.mode is RolloutMode.SFT:
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


def _check_reward_kl(settings: Settings) -> None:
    """Refuse divergence in rewards where advantages are not those of an estimator, which the trainer asks again."""
    teacher, what = settings.teacher, "train.loss.reward_kl_coefficient takes from rewards"
    if settings.train.loss.reward_kl_coefficient == 0:
        return
    if settings.plugins.advantage:
        raise ConfigError(
            f"{what}, of which plugins.advantage makes advantages before the trainer knows the divergence: remove one "
            "of them, or set train.loss.kl_coefficient"
        )
    if teacher is not None and teacher.use is TeacherUse.LOSS:
        raise ConfigError(
            f"{what}, and with teacher.use = 'loss' advantages are the teacher's: set train.loss.kl_coefficient instead"
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
        ConfigError: If it has no modules such as an adapter is asked for, or there is no peft to make one, or it has no
            experts, and something is asked of these.
    """
    if not has_weights(checkpoint):
        raise CheckpointError(
            f"{checkpoint}: no weights, and training needs them here, also where servers generate: put the model's "
            "*.safetensors and config.json there"
        )
    _check_adapter(settings, checkpoint)
    _check_experts(settings, checkpoint)
    if settings.engine.is_embedded and settings.needs_engine and settings.train.checkpoint is None:
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


def _check_adapter(settings: Settings, checkpoint: Path) -> None:
    lora, servers = settings.train.lora, settings.policy_servers
    if lora is None:
        if servers is not None and servers.weights_transport == "adapter":
            raise ConfigError('weights_transport = "adapter" is for what [train.lora] trains: add it, or set "disk"')
        return
    if settings.cluster.has_trainer_actor:
        raise ConfigError("train.lora: adapters are trained in this process: set cluster.trainer = 'driver'")
    if settings.train.warm_up is not None and settings.model.checkpoint in (TINY_MODEL, TINY_MOE_MODEL):
        raise ConfigError(
            f"train.lora: the weights of model.checkpoint = {settings.model.checkpoint!r} are random and stay so, and "
            "no adapter gets as far as train.warm_up asks: warm up without train.lora, and name the folder model/ of "
            "that run as model.checkpoint, without [train.warm_up]"
        )
    for name, table in settings.engine.servers.items():
        most = max(KINDS[name].adapter_ranks, default=lora.rank)
        if table.weights_transport == "adapter" and lora.rank > most:
            raise ConfigError(
                f"train.lora.rank = {lora.rank}: {KINDS[name].label} takes adapters of a rank up to {most}: lower it, "
                f'or set engine.{name}.weights_transport = "disk"'
            )
    # They import PyTorch, which takes seconds.
    from rollfeed.model_files.loading import empty_model
    from rollfeed.model_files.low_rank import check_peft, check_targets

    check_peft()
    check_targets(empty_model(checkpoint, trust_remote_code=settings.model.trust_remote_code), lora.target_modules)


def _check_experts(settings: Settings, checkpoint: Path) -> None:
    replays, coefficient = settings.train.routing_replay, settings.train.loss.router_aux_loss_coefficient
    if not (replays or coefficient):
        return
    # They import PyTorch, which takes seconds.
    from rollfeed.model_files.expert_choices import has_balancing_loss, num_experts_of
    from rollfeed.model_files.loading import empty_model

    model = empty_model(checkpoint, trust_remote_code=settings.model.trust_remote_code)
    balances = f"train.loss.router_aux_loss_coefficient = {coefficient:g}"
    if num_experts_of(model) is None:
        what = "train.routing_replay = true" if replays else balances
        raise ConfigError(f"{what}: the model has no experts by its configuration: remove it")
    if coefficient and not has_balancing_loss(model):
        raise ConfigError(
            f"{balances}: transformers computes no load-balancing loss of {type(model).__name__}: remove it"
        )


def _check_memory(settings: Settings) -> None:
    prompt, response = settings.max_prompt_length, settings.sampling.rollout_max_response_len
    longest, budget = settings.max_sample_length, settings.train.micro_batch_tokens
    what = f"a prompt of {prompt} and a response of {response} tokens are allowed"
    remedy = "prompts.rollout_max_prompt_len or sampling.rollout_max_response_len"
    own, is_sft = settings.plugins, settings.rollout.mode is RolloutMode.SFT
    if own.prompt_source or own.generate or own.rollout or is_sft:
        # They may draw the line between prompt and response elsewhere.
        longest = settings.max_context_length
        remedy = "engine.context_length" if is_sft else "sampling.rollout_max_context_len"
        what = f"samples of {longest} tokens are allowed"
    # The last token is no input: nothing behind it is predicted.
    if longest - 1 > budget:
        raise ConfigError(
            f"train.micro_batch_tokens = {budget}: {what} and would not fit; raise it to "
            f"{longest - 1}, or lower {remedy}"
        )


def not_computed(error: BaseException, *, step: int) -> str:
    """Return what is said of a batch that PyTorch or numpy have failed at."""
    return (
        f"step {step}: it cannot be trained on: {in_one_line(error)}; where memory is short, lower "
        "train.micro_batch_tokens"
    )
