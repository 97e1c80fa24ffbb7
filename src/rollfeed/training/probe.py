"""What the trainer's weights say of a few texts, as an engine may hold them.

An engine has the weights in the type that they are published in, or in a coarser one of its own. At small learning
rates an update is smaller than the steps of such a type: most weights then stay as they are, in an engine that has
taken the update as in one that has not. So the trainer scores the texts with its weights rounded in the same way. It
computes in fp32: passes in bf16 round each weight and sum anew after an update, and what that does to a text (0.035
nats a token of a small model on a GPU after one update at 1e-5) is larger than the update, and another in each program.

Axes: N tokens that have a log-probability: of each text all but the first, text after text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollfeed.training.model import Policy
from rollfeed.training.packing import pack_sequences
from rollfeed.training.sequences import TrainSequence
from rollfeed.types import TrainBatch

Rounding = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]
"""Returns a module's weight as an engine holds it, in the type of the trainer's."""


def choose_texts(batch: TrainBatch, *, num_texts: int, num_tokens: int) -> tuple[NDArray[np.int32], ...]:
    """Return the ends of prompts with the beginnings of their answers, where training changes the policy most.

    They are of different groups as far as there are some, and begin with the first token of their sample, which some
    models cannot do without.

    Args:
        batch: Whose samples they are taken from.
        num_texts: The most texts.
        num_tokens: The most tokens of each.
    """
    samples = [sample for group in batch.groups for rollout in group.rollouts[:1] for sample in rollout.samples[:1]]
    samples += [sample for sample in batch.samples if all(sample is not other for other in samples)]
    texts: list[NDArray[np.int32]] = []
    for sample in samples:
        start = max(1, min(sample.prompt_length - num_tokens // 2, len(sample.token_ids) - num_tokens + 1))
        text = np.concatenate([sample.token_ids[:1], sample.token_ids[start : start + num_tokens - 1]])
        if len(text) > 1 and not any(np.array_equal(text, other) for other in texts):
            texts.append(text)
        if len(texts) == num_texts:
            break
    return tuple(texts)


def score_texts(
    policy: Policy, texts: Sequence[NDArray[np.int32]], *, rounding: Rounding | None, micro_batch_tokens: int
) -> NDArray[np.float64]:
    """Return the log-probabilities of all tokens but the first of each text, before any temperature, ``(N,)``.

    Args:
        policy: Its model is as it was afterwards.
        texts: At least two token ids each.
        rounding: What becomes of the weights in the engine; None leaves them.
        micro_batch_tokens: The most places computed at once, or those of one text.
    """
    sequences = [_whole(text, number) for number, text in enumerate(texts)]
    micro_batches = pack_sequences(
        sequences,
        [sequence.mask_T for sequence in sequences],
        micro_batch_tokens=max(micro_batch_tokens, *(len(text) for text in texts)),
        share_prompts=False,
    )
    found: dict[int, NDArray[np.float64]] = {}
    with torch.no_grad(), policy.computing(), _rounded(policy.model, rounding):
        for micro_batch in micro_batches:
            logprobs_T = policy.score(micro_batch, temperature=1.0, exact=True).logprobs_T.double().cpu().numpy()
            for number in np.unique(micro_batch.sequence_ids_T):
                found[int(number)] = logprobs_T[micro_batch.sequence_ids_T == number]
    return np.concatenate([found[number] for number in range(len(texts))])


def _whole(text: NDArray[np.int32], number: int) -> TrainSequence:
    num_trained = len(text) - 1
    return TrainSequence(
        sequence_id=number,
        sample_index=number,
        rollout_id=number,
        family=number,
        token_ids=text,
        prompt_length=1,
        positions_T=np.arange(1, len(text)),
        mask_T=np.ones(num_trained, np.float32),
        rollout_logprobs_T=np.zeros(num_trained, np.float32),
        advantages_T=np.ones(num_trained, np.float32),
    )


@contextmanager
def _rounded(model: Any, rounding: Rounding | None) -> Iterator[None]:
    """Have each module compute with its own weights rounded, one module at a time: there is no second model."""
    if rounding is None:
        yield
        return
    kept: dict[Any, list[tuple[Any, torch.Tensor]]] = {}

    def round_weights(module: Any, inputs: Any) -> None:
        own = [each for each in module.parameters(recurse=False) if each.is_floating_point()]
        kept[module] = [(parameter, parameter.data) for parameter in own]
        for parameter, exact in kept[module]:
            parameter.data = rounding(module, exact)

    def restore(module: Any, inputs: Any, output: Any) -> None:
        for parameter, exact in kept.pop(module):
            parameter.data = exact

    hooks = []
    try:
        for module in model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                hooks.append(module.register_forward_pre_hook(round_weights))
                hooks.append(module.register_forward_hook(restore, always_call=True))
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameters in kept.values():
            for parameter, exact in parameters:
                parameter.data = exact
