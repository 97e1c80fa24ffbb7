"""A causal language model of transformers, and the log-probabilities it gives to tokens.

Axes: B rows, L places in a row, D hidden size, V vocabulary, K places with logits, T trained tokens.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollfeed.base.cores import num_physical_cores
from rollfeed.config.train import TrainPrecision, TrainSettings
from rollfeed.errors import ConfigError
from rollfeed.model_files.expert_choices import BalanceMeter, RouterBalance, Routers
from rollfeed.model_files.heads import Head, HeadShape, find_head_shape, hidden_states
from rollfeed.model_files.loading import load_causal_model
from rollfeed.model_files.products import wide_products
from rollfeed.model_files.seeing import looking
from rollfeed.model_files.trees import block_arguments, tree_mask, trees_of
from rollfeed.model_files.trial import longest_text, vocab_size_of
from rollfeed.protocols import PictureProcessor
from rollfeed.training.packing import MicroBatch, TrainSequence, pack_sequences
from rollfeed.training.placed_pictures import pixels_of_rows
from rollfeed.training.ranks import Ranks, decoder_layers, empty_copy, let_go, shard
from rollfeed.training.scoring import score_tokens, to_device

logger = logging.getLogger(__name__)


def choose_device(name: str) -> torch.device:
    """Return the device of a ``train.device`` setting. Raises ConfigError if there is none of that name."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"train.device = {name!r}: not usable here ({reason}); try 'auto' or 'cpu'") from error
    return device


def computing_options(settings: TrainSettings, device: torch.device) -> dict[str, Any]:
    """Return the arguments of :class:`Policy` that say what it computes in."""
    bf16 = settings.precision is TrainPrecision.BF16 or (
        settings.precision is TrainPrecision.AUTO and device.type == "cuda"
    )
    head_dtypes = {TrainPrecision.FP32: torch.float32, TrainPrecision.BF16: torch.bfloat16}
    return {
        "autocast": torch.bfloat16 if bf16 else None,
        "head_dtype": head_dtypes.get(settings.head_precision),
        "threads": settings.threads or num_physical_cores(),
    }


def load_policy_model(checkpoint: Path, *, device: torch.device, trust_remote_code: bool = False) -> Any:
    """Return the model of a local folder in fp32, in evaluation mode.

    A policy that changes from one pass to the next, by dropout or noise in a router, has no ratio to what sampled the
    tokens.

    Raises:
        CheckpointError: If the folder is not that of a causal language model, or lacks weights.
    """
    model = load_causal_model(
        checkpoint, dtype=torch.float32, trust_remote_code=trust_remote_code, change_config=switch_dropout_off
    )
    return model.to(device)


def enable_activation_checkpointing(model: Any) -> None:
    """Have the model compute its layers again in the backward pass.

    transformers does so in training mode only, in which the modules concerned are then; dropout stays off.

    Raises:
        ConfigError: If it does not know how.
    """
    try:
        # Earlier releases of transformers 5 have it under its older name only.
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable({"use_reentrant": False})
        else:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    except ValueError as error:
        raise ConfigError(f"train.activation_checkpointing = true: {error}; set it to false") from error
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True


def prepare_passes(policy: Policy, settings: TrainSettings) -> None:
    """Have passes with a gradient keep what the settings say, and compute what is compiled.

    Raises:
        ConfigError: If the model knows no activation checkpointing, or has no routers to be told the experts, or to be
            balanced.
    """
    if settings.activation_checkpointing:
        enable_activation_checkpointing(policy.model)
        policy.offloads = settings.activation_offload
    if settings.routing_replay:
        try:
            policy.routers = Routers(policy.model)
        except ValueError as error:
            raise ConfigError(f"train.routing_replay = true: {error}; set it to false") from error
    if coefficient := settings.loss.router_aux_loss_coefficient:
        try:
            policy.balance_meter = BalanceMeter(policy.model)
        except ValueError as error:
            what = f"train.loss.router_aux_loss_coefficient = {coefficient:g}"
            raise ConfigError(f"{what}: {error}; set it to 0") from error
    if settings.compile:
        for layer in decoder_layers(policy.model):
            layer.compile(dynamic=True)  # once for all lengths


def hold_linear_layers_as_computed(policy: Policy, *, is_published: bool = False) -> None:
    """Hold the linear layers of a policy that are not trained in the type that its passes compute them in.

    These would round them each time; half the memory then, and the same values to the bit. Where a few tokens say
    otherwise, the layers stay as they are; of what ``is_published``, so does what that type cannot hold whole. Passes
    that are ``exact`` need their weights in fp32.
    """
    dtype, model = policy.autocast, policy.model
    if dtype is None or policy.pictures is not None:  # the tokens would not go through what sees
        return
    spared = {id(model.get_input_embeddings().weight)}
    if policy.head_dtype is not None:
        spared.add(id(getattr(model.get_output_embeddings(), "weight", None)))
    layers = [each for each in model.modules() if type(each) is torch.nn.Linear and id(each.weight) not in spared]
    frozen = [each for layer in layers for each in layer.parameters() if not each.requires_grad]
    parameters = [each for each in frozen if not is_published or torch.equal(each.to(dtype).float(), each)]
    sequence = TrainSequence.of_tokens(np.arange(24, dtype=np.int32) % policy.vocab_size, prompt_length=1, number=0)

    def logprobs() -> Tensor:
        passes = pack_sequences([sequence], [sequence.mask_T], micro_batch_tokens=24, share_prompts=False)
        with torch.compiler.set_stance("force_eager"):
            return policy.score_each(passes)[0].logprobs_T

    before, kept = logprobs(), [None if is_published else each.data for each in parameters]
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype)
    try:
        is_same = torch.equal(logprobs(), before)
    except RuntimeError:  # a layer that is computed outside of autocast has inputs of another type
        is_same = False
    if not is_same:
        for parameter, data in zip(parameters, kept, strict=True):
            parameter.data = parameter.data.float() if data is None else data


def freeze(model: Any, patterns: Sequence[str]) -> None:
    """Keep parameters from being trained whose names have a match of some pattern.

    Raises:
        ConfigError: If a pattern has a match in none, or nothing is left.
    """
    for pattern in patterns:
        found = [parameter for name, parameter in model.named_parameters() if re.search(pattern, name)]
        if not found:
            some = ", ".join(name for name, _ in list(model.named_parameters())[:3])
            raise ConfigError(f"train.freeze_params: {pattern!r} matches no parameter of the model ({some}, ...)")
        for parameter in found:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("train.freeze_params: nothing is left to train: remove a pattern")


class Scored(NamedTuple):
    """Log-probabilities and entropies of the trained tokens of a micro-batch."""

    logprobs_T: Tensor
    """Natural-log probability after temperature; has a gradient where the pass has."""
    entropy_T: Tensor
    """Of the distribution that the token was predicted by; it has a gradient, too."""
    balance: RouterBalance | None = None
    """Of all the micro-batch's tokens, those of prompts included; None where it is not asked for."""


class Policy:
    """A model as the distribution that tokens are sampled from, at one temperature.

    Args:
        model: What :func:`load_policy_model` returned.
        temperature: What the logits are divided by, as in sampling. Truncation by ``top_p`` and the like is followed
            where there are sampling masks; without them, rollout log-probabilities are larger than these.
        autocast: What the passes compute in; None leaves it to the weights.
        head_dtype: What the head's product is computed in; None leaves it to the passes.
        head_shape: How the head goes on behind it, as another policy of the model found; by default it is tried.
        threads: Of the CPU; None leaves it to PyTorch.
        pictures: The model's processor of pictures; None where there are none.
    """

    def __init__(
        self,
        model: Any,
        *,
        temperature: float,
        autocast: torch.dtype | None = None,
        head_dtype: torch.dtype | None = None,
        head_shape: HeadShape | None = None,
        threads: int | None = None,
        pictures: PictureProcessor | None = None,
    ) -> None:
        self.model = model
        self.pictures = pictures
        self.device: torch.device = next(model.parameters()).device
        self.vocab_size = vocab_size_of(model)
        self._temperature = temperature
        self.autocast = autocast
        self.head_dtype = head_dtype
        self._threads = threads
        self.head_shape = head_shape or self._find_head()
        """How the head goes on behind its product; None where it cannot be computed by itself."""
        self.attends_in_blocks = False
        """Whether rows with branches are attended to block by block; the model has been asked to."""
        self.routers: Routers | None = None
        """What takes the experts again that tokens were sampled with; None where the model chooses itself."""
        self.balance_meter: BalanceMeter | None = None
        self.offloads = False
        """Whether what passes keep for the way back waits in the CPU's memory."""

    def score(self, micro_batch: MicroBatch, *, temperature: float | None = None, exact: bool = False) -> Scored:
        """Return log-probabilities and entropies of the trained tokens, ``(T,)`` each.

        ``temperature`` is another one than the policy's; ``exact`` computes in the type of the weights, whatever the
        passes of training compute in.
        """
        autocast, micro_batch = None if exact else self.autocast, self.arranged(micro_batch)
        if self.routers is not None:
            experts_BLC = micro_batch.experts_BLC
            self.routers.replay(None if experts_BLC is None else self._tensor(experts_BLC))
        with torch.autocast(self.device.type, dtype=autocast, enabled=autocast is not None):
            rows_TX, head = self._pass(micro_batch)
        scored = Scored(
            *score_tokens(
                rows_TX,
                target_T=self._tensor(micro_batch.targets_T),
                temperature=temperature or self._temperature,
                head=head,
                dtype=(None if exact else self.head_dtype or autocast) if head else None,
                drawn_from=micro_batch.sampling_mask,
            ),
            balance=None
            if self.balance_meter is None
            else self.balance_meter.read(self._tensor(micro_batch.token_mask)),
        )
        if not torch.is_grad_enabled():
            let_go(self.model)
        return scored

    def arranged(self, micro_batch: MicroBatch) -> MicroBatch:
        """Return a micro-batch in the rows that it is computed in."""
        return micro_batch.without_padding() if self.attends_in_blocks else micro_batch

    def score_each(
        self, micro_batches: Iterable[MicroBatch], *, temperature: float | None = None, exact: bool = False
    ) -> dict[int, Scored]:
        """Return what :meth:`score` says of each sequence, on the CPU and without gradient, by ``sequence_id``."""
        found: dict[int, Scored] = {}
        with torch.no_grad(), self.computing():
            for micro_batch in micro_batches:
                scored = self.score(micro_batch, temperature=temperature, exact=exact)
                for number in np.unique(micro_batch.sequence_ids_T):
                    own = torch.from_numpy(micro_batch.sequence_ids_T == number)
                    found[int(number)] = Scored(scored.logprobs_T.cpu()[own], scored.entropy_T.cpu()[own])
        return found

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Have what this thread computes take the policy's number of threads, whatever others have set."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads or before)
        try:
            with wide_products(self.device):
                yield
        finally:
            torch.set_num_threads(before)

    def check(self, sequence: TrainSequence, *, name: str, remedy: str) -> None:
        """Raise ConfigError if a token id is outside the model's vocabulary, or the sequence longer than it takes.

        ``remedy`` is what helps where it is too long.
        """
        longest = longest_text(self.model)
        if longest is not None and sequence.num_inputs > longest:
            raise ConfigError(
                f"{name} {sequence.sample_index} has {sequence.num_inputs} tokens, and the model that is trained takes "
                f"at most {longest}: {remedy}"
            )
        # What nobody has sampled, such as a warm-up's answers, has no experts to be computed with.
        routers = None if sequence.versions_T is None else self.routers
        if routers is not None and (problem := routers.problem(sequence.routed_experts, sequence.num_inputs)):
            raise ConfigError(f"train.routing_replay = true: {name} {sequence.sample_index} {problem}")
        largest = int(sequence.token_ids.max())
        if largest >= self.vocab_size:
            raise ConfigError(
                f"token id {largest} is outside the model's vocabulary of {self.vocab_size}: the tokenizer of the "
                "rollouts does not belong to the model that is trained"
            )

    def _find_head(self) -> HeadShape | None:
        shape = find_head_shape(self.model)
        if isinstance(shape, HeadShape):
            return shape
        logger.warning("%s: logits of all tokens are in memory at once: %s", type(self.model).__name__, shape)
        return None

    def _pass(self, micro_batch: MicroBatch) -> tuple[Tensor, Head | None]:
        """Return what predicts the trained tokens, ``(T, D)``, and its head; or their logits ``(T, V)`` and None."""
        shape, columns_T = self.head_shape, micro_batch.columns_T
        rows_T = self._tensor(micro_batch.rows_T)
        if shape is not None:
            with hidden_states(self.model) as found, self._keeping():
                self._forward(micro_batch)
            place_T = rows_T * micro_batch.token_ids_BL.shape[1] + self._tensor(columns_T)
            rows_TD = found.hidden_BLD.flatten(0, 1).index_select(0, place_T)
            return rows_TD, Head(found.weight_VD, found.bias_V, shape)
        if "logits_to_keep" not in inspect.signature(self.model.forward).parameters:
            return self._forward(micro_batch).logits[rows_T, self._tensor(columns_T)], None
        columns_K, kept_T = np.unique(columns_T, return_inverse=True)
        logits_BKV = self._forward(micro_batch, logits_to_keep=self._tensor(columns_K)).logits
        return logits_BKV[rows_T, self._tensor(kept_T)], None

    def _keeping(self) -> AbstractContextManager[Any]:
        if not self.offloads:
            return nullcontext()
        return torch.autograd.graph.save_on_cpu(pin_memory=self.device.type == "cuda")

    def _forward(self, micro_batch: MicroBatch, **inputs: Any) -> Any:
        inputs |= {"input_ids": self._tensor(micro_batch.token_ids_BL), "use_cache": False}
        is_picture_BL = micro_batch.is_picture_BL
        if micro_batch.branches_BL is not None:
            inputs["position_ids"] = self._tensor(micro_batch.position_ids_BL)
            if self.attends_in_blocks:
                [branches_L], [position_ids_L] = micro_batch.branches_BL, micro_batch.position_ids_BL
                inputs |= block_arguments(trees_of(branches_L, position_ids_L), self.device)
            else:
                inputs["attention_mask"] = tree_mask(self._tensor(micro_batch.branches_BL), inputs["position_ids"])
        if is_picture_BL is None or self.pictures is None:
            return self.model(**inputs)
        pixels = pixels_of_rows(micro_batch.pictures_B, self.pictures)
        token_ids_BL = inputs.pop("input_ids")
        with looking(self.model, token_ids_BL, is_picture_BL=self._tensor(is_picture_BL), pixels=pixels) as arguments:
            return self.model(**arguments, **inputs)

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return to_device(array, self.device)


def spread(policy: Policy, reference: Policy | None, ranks: Ranks, *, device: torch.device, **options: Any) -> Policy:
    """Leave to each rank its part of the models; return a policy that computes with the trained one's weights.

    ``options`` are those of :class:`Policy`.
    """
    exact = Policy(empty_copy(policy.model), head_shape=policy.head_shape, **options)
    for buffer in exact.model.buffers():
        buffer.data = buffer.to(device)
    for each in filter(None, (policy, reference)):
        types = {"computes_in": options["autocast"], "head_in": options["head_dtype"]}
        shard(each.model, device=device, num_ranks=ranks.size, **types)
        each.device = device
    exact.device, exact.routers = device, policy.routers  # its hooks are the same
    return exact


def switch_dropout_off(config: Any) -> None:
    """Take dropout out of a configuration of transformers."""
    for part in filter(None, (config, config.get_text_config(decoder=True), getattr(config, "vision_config", None))):
        for name, value in vars(part).items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
