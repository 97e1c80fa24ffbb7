"""How fast the matrix products of a training step could be: the bound that its passes are compared with.

Counted are the products of the linear layers and of the head, forward and backward: with N rows in, ``(N, I) @ (I, O)``
for the outputs, ``(N, O) @ (O, I)`` for the gradient of the inputs and ``(O, N) @ (N, I)`` for that of the weights, so
``6 * N * I * O`` operations a layer. Not counted are embedding, attention, norms, activations, softmax and loss. What
is measured are plain products of float32 arrays of these shapes by the same library with as many threads, written into
arrays that are there already.

Axes: N rows, I inputs and O outputs of a layer.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollfeed.errors import CheckpointError

_REPETITIONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearLayers:
    """The shapes ``(O, I)`` of a model's matrices."""

    inner: Counter[tuple[int, int]]
    """How often each is there; every token goes through all of them."""
    head: tuple[int, int]
    """Only places whose logits are needed go through it."""

    def shapes(self, *, num_tokens: int, num_logits: int) -> Iterator[tuple[tuple[int, int], int, int]]:
        """Return shape, number of layers and rows of each."""
        for shape, count in self.inner.items():
            yield shape, count, num_tokens
        yield self.head, 1, num_logits


def linear_layers(checkpoint: Path) -> LinearLayers:
    """Return the matrices of a model by its configuration; no weight is read.

    Raises:
        CheckpointError: If it has no linear layers, or none that makes logits.
    """
    config = AutoConfig.from_pretrained(str(checkpoint), local_files_only=True)
    automatic: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model: Any = automatic.from_config(config)
    head = model.get_output_embeddings()
    inner: Counter[tuple[int, int]] = Counter()
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if (
            module is not head
            and not isinstance(module, torch.nn.Embedding)
            and weight is not None
            and weight.ndim == 2
        ):
            inner[_shape(weight)] += 1
    if head is None or not inner:
        raise CheckpointError(f"{checkpoint}: its linear layers are not known, so there is nothing to compare with")
    return LinearLayers(inner=inner, head=_shape(head.weight))


def product_seconds(layers: LinearLayers, *, num_tokens: int, num_logits: int) -> float:
    """Return how long all products of one forward and backward pass take.

    Each shape is measured by itself, the median of three after a first, and taken as often as the model has it.

    Args:
        layers: Of the model.
        num_tokens: Rows of the inner layers.
        num_logits: Rows of the head.
    """
    shapes = layers.shapes(num_tokens=num_tokens, num_logits=num_logits)
    return sum(count * _seconds(shape, num_rows) for shape, count, num_rows in shapes)


def product_operations(layers: LinearLayers, *, num_tokens: int, num_logits: int) -> int:
    """Return the multiplications and additions of these products."""
    shapes = layers.shapes(num_tokens=num_tokens, num_logits=num_logits)
    return sum(6 * count * num_rows * shape[0] * shape[1] for shape, count, num_rows in shapes)


def _shape(weight: torch.Tensor) -> tuple[int, int]:
    return int(weight.shape[0]), int(weight.shape[1])


def _seconds(shape: tuple[int, int], num_rows: int) -> float:
    num_outputs, num_inputs = shape
    inputs_NI, outputs_NO = torch.rand(num_rows, num_inputs), torch.rand(num_rows, num_outputs)
    weight_OI = torch.rand(num_outputs, num_inputs)
    gradient_NO, gradient_NI, gradient_OI = torch.rand_like(outputs_NO), inputs_NI.clone(), weight_OI.clone()
    times = []
    for _ in range(1 + _REPETITIONS):
        started = time.perf_counter()
        torch.mm(inputs_NI, weight_OI.t(), out=outputs_NO)
        torch.mm(gradient_NO, weight_OI, out=gradient_NI)
        torch.mm(gradient_NO.t(), inputs_NI, out=gradient_OI)
        times.append(time.perf_counter() - started)
    return median(times[1:])
