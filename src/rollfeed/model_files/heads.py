"""The head of a causal language model, apart from the rest: what turns hidden states into logits.

Most heads are one linear layer; some models scale its outputs, or bend them under a cap. What a model does is found by
trying: numbers of which one knows what should become of them take the place of the head's outputs, and the logits of a
short text have to be the model's own.

Axes: B rows, L places in a row, D hidden size, V vocabulary, X grid of numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollfeed.model_files.trial import vocab_size_of

_LENGTH = 6
"""Of the text."""
_TOLERANCE = 2e-5
"""Between logits in fp32, for the largest of them; in a type of its own, two of its steps."""
_SMALL, _LARGE = 2.0**-13, 1e6
"""A number that no cap bends, and one that every cap stops."""
_GRID_X = (_SMALL, _LARGE, -_LARGE, 0.0, *(sign * value for value in (0.5, 3.0, 11.0, 29.0, 90.0) for sign in (1, -1)))


class HeadShape(NamedTuple):
    """The rest of a head behind its product: ``x * scale``, or ``cap * tanh(x * scale / cap)``."""

    scale: float = 1.0
    cap: float | None = None

    def apply(self, product: Tensor) -> Tensor:
        """Return the logits, in new memory unless they are the same."""
        if self.cap is None:
            return product if self.scale == 1.0 else product * self.scale
        return (product * (self.scale / self.cap)).tanh_().mul_(self.cap)


class Head(NamedTuple):
    """A linear head of one pass: ``shape(hidden @ weight.T + bias)``."""

    weight_VD: Tensor
    bias_V: Tensor | None
    shape: HeadShape


class HeadInputs:
    """Hidden states that a head was asked about, and the weights that it had then."""

    hidden_BLD: Tensor
    weight_VD: Tensor
    bias_V: Tensor | None


@contextmanager
def hidden_states(model: Any) -> Iterator[HeadInputs]:
    """Have passes within give away what the head is asked about, instead of logits, which are empty then.

    The weights are those of the moment: they may be rounded, or gathered, for the time of the head only.
    """
    found = HeadInputs()
    head = model.get_output_embeddings()

    def take(hidden_BLD: Tensor) -> Tensor:
        weight, bias = head.weight, getattr(head, "bias", None)
        if not torch.is_grad_enabled():  # a parameter's own memory may be put back behind the head
            weight, bias = weight.detach(), None if bias is None else bias.detach()
        found.hidden_BLD, found.weight_VD, found.bias_V = hidden_BLD, weight, bias
        return hidden_BLD[..., :0]

    with _computing(head, take):
        yield found


def find_head_shape(model: Any) -> HeadShape | str:
    """Return how a model's head goes on behind its product; text is why it cannot be computed apart.

    It takes three passes of a few tokens.
    """
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        return "it has no linear head"
    if not {name for name, _ in head.named_parameters()} <= {"weight", "bias"}:
        return "its head has more than a weight and a bias"
    tokens_BL = torch.arange(2 * _LENGTH, device=weight.device).reshape(2, _LENGTH) * 7 % vocab_size_of(model)
    grid_X = torch.tensor(_GRID_X, device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        try:
            logits_BLV = _logits(model, tokens_BL)
            with hidden_states(model) as found:
                model(input_ids=tokens_BL, use_cache=False)
            product_BLV = torch.nn.functional.linear(found.hidden_BLD, found.weight_VD, found.bias_V)
            places_BLV = torch.arange(product_BLV.numel(), device=weight.device).reshape(product_BLV.shape)
            # Another number at every place of the vocabulary, and of the text: each has to be treated alike.
            probe_BLV = grid_X[(places_BLV + places_BLV // product_BLV.shape[-1]) % len(grid_X)]
            with _computing(head, lambda hidden: probe_BLV):
                bent_BLV = _logits(model, tokens_BL)
        except Exception as error:  # a model that does not take such outputs says so in a way of its own
            return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if probe_BLV.shape != bent_BLV.shape or probe_BLV.shape[:2] != tokens_BL.shape:
        return f"it makes logits of shape {tuple(bent_BLV.shape)} of {tuple(probe_BLV.shape)}"
    small, large = (float(bent_BLV[probe_BLV == value].mean()) for value in grid_X[:2])
    scale = small / float(grid_X[0])
    shape = HeadShape(scale, None if abs(large) > abs(scale) * _LARGE / 2 else abs(large))
    steps = 2 * torch.finfo(weight.dtype).eps
    for inputs, outputs in ((probe_BLV, bent_BLV), (product_BLV, logits_BLV)):
        expected, outputs = shape.apply(inputs.double()), outputs.double()
        # Not "greater than": what is not a number differs too.
        if not bool(((expected - outputs).abs() <= max(_TOLERANCE, steps) * expected.abs().clamp_min(1.0)).all()):
            return "it makes something else of its head's outputs than a scale or a cap"
    return shape


def _logits(model: Any, tokens_BL: Tensor) -> Tensor:
    logits_BLV: Tensor = model(input_ids=tokens_BL, use_cache=False).logits
    return logits_BLV


@contextmanager
def _computing(module: Any, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Have a module compute something else."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
