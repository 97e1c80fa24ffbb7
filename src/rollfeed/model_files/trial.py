"""A loaded model is tried: whether what it says of a token depends on what is before that token, and on nothing else.

Sampling and training take that for granted. A list of architectures would not know the next one, and a class may be
causal or not by its configuration; so a short text goes through the model in several ways that have to agree.

Axes: B rows, L places in a row, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from rollfeed.errors import CheckpointError
from rollfeed.model_files.headers import read_headers, weight_files
from rollfeed.model_files.loading import load_causal_model

_LENGTH = 40
"""Of the texts. Windows of tiny models are shorter; those of others are not reached."""
_PROMPT_SHARE = 2 / 3
"""Of a text, what is no answer."""
_TOLERANCE = 2e-5
"""Between log-probabilities, for the largest of them; what rounding makes of one sum in two orders is less."""

_SMALL_BYTES = 1 << 30


def is_small(folder: Path) -> bool:
    """Whether a model is loaded in a moment, so that it can be tried before anything starts.

    Raises:
        CheckpointError: If there are no weights.
    """
    read_headers(folder)
    return sum(file.stat().st_size for file in weight_files(folder)) <= _SMALL_BYTES


def load_tried(folder: Path, *, dtype: torch.dtype, generates: bool, trust_remote_code: bool = False) -> Any:
    """Return the model of a folder, in evaluation mode; in fp32, where rounding hides nothing, it has been tried.

    Raises:
        CheckpointError: If it cannot be loaded, or not be sampled from and trained.
    """
    model = load_causal_model(folder, dtype=dtype, trust_remote_code=trust_remote_code)
    refusal = refusal_of_model(model, generates=generates) if dtype is torch.float32 else None
    if refusal is not None:
        raise CheckpointError(f"{folder}: not a model to sample from and train: {refusal}")
    return model


def refusal_of_model(model: Any, *, generates: bool) -> str | None:
    """Return why a model cannot be sampled from and trained; None where it can. It takes a few short passes.

    Args:
        model: In fp32 and in evaluation mode.
        generates: Whether transformers generates with it as well, token by token.
    """
    texts_BL = _texts(model)
    kept = list(model.state_dict(keep_vars=True).values())
    versions = [tensor._version for tensor in kept]
    with torch.no_grad():
        try:
            both_BLV, alone_LV = _logprobs(model, texts_BL), _logprobs(model, texts_BL[:1])[0]
            if _differ(alone_LV, both_BLV[0]):
                # Once in a hundred loads a sound model did, and not again.
                both_BLV = _logprobs(model, texts_BL)
            refusal = _dependence(model, texts_BL[0], both_BLV[0], alone_LV)
        except Exception as error:  # a model that wants more than tokens says so in a way of its own
            return f"it does not run on tokens alone ({_first_line(error)})"
        try:
            if refusal is None and generates:
                refusal = _difference_in_generation(model, texts_BL, both_BLV)
        except Exception as error:
            return f"transformers cannot generate with it token by token ({_first_line(error)})"
    if refusal is None and versions != [tensor._version for tensor in kept]:
        return "it changes its own weights when it computes"
    return refusal


def _texts(model: Any) -> Tensor:
    """Return two texts that begin alike."""
    length = min(_LENGTH, longest_text(model) or _LENGTH)
    generator = torch.Generator().manual_seed(0)
    texts_BL = torch.randint(vocab_size_of(model), (2, length), generator=generator)
    texts_BL[1, : _prompt_length(length)] = texts_BL[0, : _prompt_length(length)]
    return texts_BL.to(model.device)


def _prompt_length(length: int) -> int:
    return max(1, int(length * _PROMPT_SHARE))


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def vocab_size_of(model: Any) -> int:
    """Return how many token ids a model takes."""
    return int(model.config.get_text_config(decoder=True).vocab_size)


def longest_text(model: Any) -> int | None:
    """Return how many tokens a model has positions for; None where it sets no limit."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def _dependence(model: Any, text_L: Tensor, logprobs_LV: Tensor, alone_LV: Tensor) -> str | None:
    """Return on what else than earlier tokens the model's output depends."""
    if _differ(alone_LV, logprobs_LV):
        if _differ(_logprobs(model, text_L[None])[0], alone_LV):
            return "it says something else of one text each time"
        return "what it says of a text depends on the other texts of a batch"
    length = _prompt_length(len(text_L))
    if _differ(_logprobs(model, text_L[None, :length])[0], alone_LV[:length]):
        hint = " (is_decoder is false)" if getattr(model.config, "is_decoder", None) is False else ""
        return f"it is not causal: what follows in a text changes what it says of earlier tokens{hint}"
    return None


def _difference_in_generation(model: Any, texts_BL: Tensor, logprobs_BLV: Tensor) -> str | None:
    length = _prompt_length(texts_BL.shape[1])
    generated_BLV = _generated_logprobs(model, texts_BL, prompt_length=length)
    if _differ(generated_BLV, logprobs_BLV[:, length - 1 : -1]):
        return "token by token it says something else of a text than at once, so rollouts would not be its policy's"
    return None


def _logprobs(model: Any, texts_BL: Tensor) -> Tensor:
    logits_BLV: Tensor = model(input_ids=texts_BL, use_cache=False).logits
    if logits_BLV.shape[:2] != texts_BL.shape:
        raise ValueError(f"its logits are of shape {tuple(logits_BLV.shape)} for tokens of {tuple(texts_BL.shape)}")
    return logits_BLV.float().log_softmax(dim=-1)


def _generated_logprobs(model: Any, texts_BL: Tensor, *, prompt_length: int) -> Tensor:
    """Have transformers generate the texts, and return what it says of each token."""
    follow = _Follow(texts_BL)
    prompts_BL = texts_BL[:, :prompt_length]
    settings: Any = GenerationConfig
    before, model.generation_config = model.generation_config, settings()
    try:
        model.generate(
            prompts_BL,
            attention_mask=torch.ones_like(prompts_BL),
            generation_config=settings(
                max_new_tokens=texts_BL.shape[1] - prompt_length, do_sample=False, pad_token_id=0
            ),
            logits_processor=LogitsProcessorList([follow]),
        )
    finally:
        model.generation_config = before
    return torch.stack(follow.logprobs, dim=1)


def _differ(first: Tensor, second: Tensor) -> bool:
    difference = torch.where(first == second, 0.0, (first - second).abs())
    finite = second[second.isfinite()].abs()
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    # Not "greater than": what is not a number differs too.
    return not bool((difference <= _TOLERANCE * scale).all())


class _Follow(LogitsProcessor):
    """Leaves only the next token of a given text, and keeps what the model says there."""

    def __init__(self, texts_BL: Tensor) -> None:
        self._texts_BL = texts_BL
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.logprobs.append(scores.float().log_softmax(dim=-1))
        next_B1 = self._texts_BL[:, input_ids.shape[1], None]
        return torch.full_like(scores, -torch.inf).scatter_(1, next_B1, 0.0)
