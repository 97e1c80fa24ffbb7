"""A causal language model of transformers, and the log-probabilities it gives to tokens.

A prompt that several responses share may be computed once for all of them, in a row with branches. Places in such a row
are no distances: a window, a recurrence or a bias that goes by the place sees something else there than in a sequence
alone. So it is tried: sequences are packed as training packs them, and scored both ways. A window is found if the rows
of the trial are longer than it; they are as long as rows with branches become, as far as the time allows, and behind
that only the configuration tells.

Axes: B rows, L places in a row, K places with logits, V vocabulary, N all places with logits, T trained tokens.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollfeed.config.train import TrainPrecision, TrainSettings
from rollfeed.errors import CheckpointError, ConfigError
from rollfeed.model_files import loading
from rollfeed.model_files.trial import longest_text, refusal_of_model, vocab_size_of
from rollfeed.training.packing import LONGEST_TREE, MicroBatch, pack_sequences
from rollfeed.training.scoring import DrawnFrom, score_tokens
from rollfeed.training.sequences import TrainSequence

logger = logging.getLogger(__name__)

_BRANCH_LENGTHS = (9, 13)
_SHORTEST = 64
"""Places of the shorter trial's row; windows of tiny models are shorter."""
_MOST_OPERATIONS = 5e10
"""Of the longer trial on a CPU, where that is a second."""
_TOLERANCE = 1e-5
"""Between log-probabilities, for the largest of them."""
_WINDOW = re.compile(r"window|attention_chunk|attn_chunk|local_attention|index_topk|indexer_budget")
_NO_WINDOW = re.compile(r"layers|pattern|dropout")
_FULL = "full_attention"


def choose_device(name: str) -> torch.device:
    """Return the device of a ``train.device`` setting.

    Raises:
        ConfigError: If there is none of that name.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"train.device = {name!r}: not usable here ({reason}); try 'auto' or 'cpu'") from error
    return device


def autocast_of(precision: TrainPrecision, device: torch.device) -> torch.dtype | None:
    """Return what passes compute in on a device; None leaves it to the weights."""
    bf16 = precision is TrainPrecision.BF16 or (precision is TrainPrecision.AUTO and device.type == "cuda")
    return torch.bfloat16 if bf16 else None


def load_model(checkpoint: Path, *, device: torch.device, trust_remote_code: bool = False) -> Any:
    """Return the model of a local folder in fp32, in evaluation mode.

    A policy that changes from one pass to the next, by dropout or noise in a router, has no ratio to what sampled the
    tokens.

    Raises:
        CheckpointError: If the folder is not that of a causal language model, or lacks weights.
    """
    model = loading.load_model(
        checkpoint, dtype=torch.float32, trust_remote_code=trust_remote_code, change_config=_switch_dropout_off
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


class Scored(NamedTuple):
    """What a model says of the trained tokens of a micro-batch."""

    logprobs_T: Tensor
    """Natural-log probability after temperature; has a gradient where the pass has."""
    entropy_T: Tensor
    """Of the distribution that the token was predicted by; without gradient."""


class Policy:
    """A model as the distribution that tokens are sampled from, at one temperature.

    Args:
        model: What :func:`load_model` returned.
        temperature: What the logits are divided by, as in sampling. Truncation by ``top_p`` and the like is followed
            where there are sampling masks; without them, rollout log-probabilities are larger than these.
        autocast: What the passes compute in; None leaves it to the weights.
        threads: Of the CPU; None leaves it to PyTorch.
    """

    def __init__(
        self, model: Any, *, temperature: float, autocast: torch.dtype | None = None, threads: int | None = None
    ) -> None:
        self.model = model
        self.device: torch.device = next(model.parameters()).device
        self.vocab_size = vocab_size_of(model)
        self._temperature = temperature
        self._autocast = autocast
        self._threads = threads
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def score(self, micro_batch: MicroBatch, *, temperature: float | None = None, exact: bool = False) -> Scored:
        """Return log-probabilities and entropies of the trained tokens, ``(T,)`` each.

        Args:
            micro_batch: Whose tokens.
            temperature: Another one than the policy's.
            exact: Compute in the type of the weights, whatever the passes of training compute in.
        """
        autocast = None if exact else self._autocast
        with torch.autocast(self.device.type, dtype=autocast, enabled=autocast is not None):
            logits_BKV = self._logits(micro_batch)
        num_kept = len(micro_batch.columns_K)
        place_T = self._tensor(micro_batch.rows_T * num_kept + micro_batch.kept_T)
        logits_NV = logits_BKV.reshape(-1, logits_BKV.shape[-1])
        mask = micro_batch.sampling_mask
        logprobs_T, entropy_N = score_tokens(
            logits_NV,
            place_T=place_T,
            target_T=self._tensor(micro_batch.targets_T),
            temperature=temperature or self._temperature,
            drawn_from=None
            if mask is None
            else DrawnFrom(self._tensor(mask.positions), self._tensor(mask.token_ids.astype(np.int64))),
        )
        return Scored(logprobs_T, entropy_N[place_T])

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Have what this thread computes take the policy's number of threads, whatever others have set."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads or before)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def check(self, sequence: TrainSequence, *, name: str, remedy: str) -> None:
        """Raise ConfigError if a token id is outside the model's vocabulary, or the sequence longer than it takes.

        Args:
            sequence: To be scored.
            name: What messages call it.
            remedy: What helps where it is too long.
        """
        longest = longest_text(self.model)
        if longest is not None and sequence.num_inputs > longest:
            raise ConfigError(
                f"{name} {sequence.sample_index} has {sequence.num_inputs} tokens, and the model that is trained takes "
                f"at most {longest}: {remedy}"
            )
        largest = int(sequence.token_ids.max())
        if largest >= self.vocab_size:
            raise ConfigError(
                f"token id {largest} is outside the model's vocabulary of {self.vocab_size}: the tokenizer of the "
                "rollouts does not belong to the model that is trained"
            )

    def _logits(self, micro_batch: MicroBatch) -> Tensor:
        inputs: dict[str, Any] = {"input_ids": self._tensor(micro_batch.token_ids_BL), "use_cache": False}
        columns_K = self._tensor(micro_batch.columns_K)
        if micro_batch.branches_BL is not None:
            inputs["position_ids"] = self._tensor(micro_batch.position_ids_BL)
            inputs["attention_mask"] = tree_attention(self._tensor(micro_batch.branches_BL))
        if self._keeps_logits:
            inputs["logits_to_keep"] = columns_K
        logits: Tensor = self.model(**inputs).logits
        return logits if self._keeps_logits else logits[:, columns_K]

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return to_device(array, self.device)


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array as a tensor there, without waiting for what the device computes; on a CPU it is a view."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def longest_tree(policy: Policy, *, checkpoint: Path, settings: TrainSettings) -> int:
    """Return the most places of a row with branches; 0 where prompts are not shared, which is said.

    Raises:
        CheckpointError: If the model cannot be trained on sampled tokens at all.
    """
    refusal = refusal_of_model(policy.model, generates=False)
    if refusal is not None:
        raise CheckpointError(f"{checkpoint}: not a model to train on what was sampled: {refusal}")
    if not settings.share_prompts:
        return 0
    longest = min(LONGEST_TREE, settings.micro_batch_tokens, longest_text(policy.model) or LONGEST_TREE)
    reason = refusal_to_share(policy, longest=longest)
    if reason is not None:
        logger.info("%s: prompts are computed once for each response (train.share_prompts): %s", checkpoint, reason)
        return 0
    return longest


def refusal_to_share(policy: Policy, *, longest: int) -> str | None:
    """Return why prompts cannot be shared in rows of up to ``longest`` places; None where they can."""
    model = policy.model
    config = model.config.get_text_config(decoder=True).to_dict()
    window = next((each for each in _windows(config) if each[1] < longest), None)
    if window is not None:
        return f"its attention is local ({window[0]} = {window[1]})"
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    affordable = longest if policy.device.type != "cpu" else int(_MOST_OPERATIONS / (6 * num_parameters))
    exact = Policy(model, temperature=1.0)
    for length in sorted({min(_SHORTEST, longest), min(max(affordable, _SHORTEST), longest)}):
        try:
            differs = _differs(exact, length)
        except Exception as error:  # a model that does not take such rows says so in a way of its own
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            return f"it does not take rows with branches ({reason})"
        if differs:
            return "in a row with branches it says something else of a response than alone"
    return None


def _windows(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield what a configuration bounds the reach of attention by, by name."""
    layer_types = config.get("layer_types")
    if (layer_types and set(layer_types) == {_FULL}) or config.get("use_sliding_window") is False:
        return
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _windows(value)
        elif _WINDOW.search(str(name)) and not _NO_WINDOW.search(name) and type(value) is int and value > 0:
            yield name, value


def _differs(policy: Policy, length: int) -> bool:
    """Return whether a row of ``length`` places with two branches gives other values than its two sequences."""
    size = policy.vocab_size
    branch_lengths = [min(branch_length, length // 3) for branch_length in _BRANCH_LENGTHS]
    prompt_length = length - sum(branch_lengths)
    prompt_P = np.arange(prompt_length) * 7 + 11
    sequences = [
        _sequence(
            np.concatenate([prompt_P, np.arange(branch_length + 1) * (5 + number) + 3]) % size, prompt_length, number
        )
        for number, branch_length in enumerate(branch_lengths)
    ]
    shared, alone = (_scored(policy, sequences, length, share_prompts=share) for share in (True, False))
    scale = max(1.0, float(np.abs(alone).max()))
    # Not "greater than": what is not a number differs too.
    return not bool((np.abs(shared - alone) <= _TOLERANCE * scale).all())


def _sequence(token_ids: NDArray[np.int64], prompt_length: int, number: int) -> TrainSequence:
    num_trained = len(token_ids) - prompt_length
    return TrainSequence(
        sequence_id=number,
        sample_index=number,
        rollout_id=number,
        family=0,
        token_ids=token_ids.astype(np.int32),
        prompt_length=prompt_length,
        positions_T=np.arange(prompt_length, len(token_ids)),
        mask_T=np.ones(num_trained, np.float32),
        rollout_logprobs_T=np.zeros(num_trained, np.float32),
        advantages_T=np.ones(num_trained, np.float32),
    )


def _scored(
    policy: Policy, sequences: Sequence[TrainSequence], length: int, *, share_prompts: bool
) -> NDArray[np.float32]:
    """Return log-probabilities and entropies of all trained tokens, in the order of the sequences."""
    micro_batches = pack_sequences(
        sequences,
        [sequence.mask_T for sequence in sequences],
        micro_batch_tokens=length,
        share_prompts=share_prompts,
        longest_tree=length,
    )
    found: dict[int, list[Tensor]] = {}
    with torch.no_grad():
        for micro_batch in micro_batches:
            scored = policy.score(micro_batch)
            for number in np.unique(micro_batch.sequence_ids_T):
                own = torch.from_numpy(micro_batch.sequence_ids_T == number)
                found[number] = [each.float().cpu()[own] for each in scored]
    return torch.cat([each for number in sorted(found) for each in found[number]]).numpy()


def tree_attention(branches_BL: Tensor) -> Tensor:
    """Return the additive mask of rows with branches, ``(B, 1, L, L)``: a place sees the prompt and its own branch."""
    length = branches_BL.shape[1]
    seen_from = branches_BL[:, :, None]
    seen = branches_BL[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=branches_BL.device).tril()
    allowed = causal & ((seen == 0) | (seen == seen_from))
    blocked = torch.finfo(torch.float32).min
    return torch.zeros(allowed.shape, device=allowed.device).masked_fill_(~allowed, blocked)[:, None]


def _switch_dropout_off(config: Any) -> None:
    for part in (config, config.get_text_config(decoder=True)):
        for name, value in vars(part).items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
