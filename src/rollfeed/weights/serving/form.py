"""Casts what a trainer gives away to what the servers of a checkpoint hold.

The checkpoint decides: names are its names, each tensor has the type that it has there, and what is FP8 there goes with
scales. Whatever brings tensors to servers takes them from here.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rollfeed.errors import CheckpointError
from rollfeed.model_files import CONFIG_FILE, TensorHeader, find_config, has_weights, headers_by_file

if TYPE_CHECKING:
    from torch import Tensor

    from rollfeed.weights.serving.fp8 import Block

TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Of tensors that are cast, as PyTorch calls them."""
_FP8 = "F8_E4M3"
_MOST_MATRICES = 32
"""That one launch makes FP8 of: more are made while the host prepares the next ones."""
_MOST_ELEMENTS = 1 << 28
"""Of such matrices, since they are there together."""
_EMBEDDING = re.compile(r"((?:.*\.)?)model\.(?:language_model\.)?embed_tokens\.weight")
_NUMPY_TYPES = {"bool": "BOOL", "float8_e4m3fn": _FP8, **{ours: theirs for theirs, ours in TYPES.items()}}
_REMEDY = "publish to servers of a model in BF16 or FP8 (e4m3, activation_scheme dynamic)"


class ServingForm:
    """Casts tensors to what the servers of ``checkpoint`` hold; without its weights they stay as they are given.

    Args:
        checkpoint: The folder that servers were started with.
        untied_head: Whether an output head that is the embeddings is given under its own name, too: vLLM keeps its old
            one otherwise.

    Raises:
        CheckpointError: If the folder is unreadable, or quantised in a way that cannot be written.
    """

    def __init__(self, checkpoint: Path | None, *, untied_head: bool = False) -> None:
        self.by_file: Mapping[str, Mapping[str, TensorHeader]] = {}
        """The headers of the checkpoint, by file."""
        config = (find_config(checkpoint) if checkpoint is not None else None) or {}
        self.is_tied = config.get("tie_word_embeddings") is True
        """Whether the output head is the embeddings, even where the checkpoint has it, too."""
        self._untied_head = untied_head
        self._block: Block | None = None
        if checkpoint is not None:
            is_here = has_weights(checkpoint)
            self.by_file = headers_by_file(checkpoint) if is_here else {}
            self._read_quantization(config, checkpoint, is_here=is_here)
        self.stored = {name: header for headers in self.by_file.values() for name, header in headers.items()}
        """The headers of the checkpoint, by name."""
        self._served = {head_of(name): header for name, header in self.stored.items()} | self.stored
        self._check_scales(checkpoint)

    def of(self, tensors: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield names and tensors, one after another, each on the device where it was; a scale after its tensor.

        What has the right type already shares its memory with what was given. Arrays of numpy become tensors where
        there is PyTorch.

        Raises:
            CheckpointError: If a tensor does not fit the checkpoint's, or has values that FP8 cannot hold; names it.
        """
        for together in self._together(self._named(tensors).items()):
            if len(together) > 1:
                yield from self._fp8(together)
            else:
                yield from self._cast(*together[0])

    def headers(self, tensors: Mapping[str, Any]) -> dict[str, TensorHeader]:
        """Return shape and type of all that :meth:`of` yields, by name, without computing it.

        Raises:
            CheckpointError: If a tensor does not fit the checkpoint's.
        """
        found: dict[str, TensorHeader] = {}
        for name, tensor in self._named(tensors).items():
            shape = self._checked_shape(name, tensor)
            stored = self._served.get(name)
            if stored is not None and stored.dtype == _FP8:
                scale = self.scale_of(name)
                found |= {name: stored, scale: self._served[scale]}
            elif stored is not None and stored.dtype in TYPES and "float" in str(tensor.dtype):
                found[name] = stored
            else:
                found[name] = TensorHeader(shape, _format_type(tensor))
        return found

    def rounded(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor with the values that servers compute with, in its own type.

        Matrices in one tensor under no name of the checkpoint, as transformers has those of experts, are taken to be
        in FP8 there.
        """
        import torch

        from rollfeed.weights.serving.fp8 import Fp8Tensor, dequantise, quantise

        if name in self._served:
            served = [each for _, each in self._cast(name, tensor)]
            return (dequantise(Fp8Tensor(*served), self._block) if self.is_fp8(name) else served[0]).to(tensor.dtype)
        if tensor.ndim < 3:
            return tensor
        matrices = [dequantise(quantise(each, self._block), self._block) for each in tensor.flatten(0, -3)]
        return torch.stack(matrices).reshape(tensor.shape).to(tensor.dtype)

    def is_fp8(self, name: str) -> bool:
        """Whether servers hold a tensor in FP8."""
        return name in self._served and self._served[name].dtype == _FP8

    def scale_of(self, name: str) -> str:
        """Return the name of the scales of a tensor in FP8."""
        return f"{name}_scale" if self._block is None else f"{name}_scale_inv"

    def _named(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return tensors with the head of a model that has none beside its embeddings, which it is then tied to."""
        if not self._untied_head:
            return tensors
        heads = {head_of(name): tensor for name, tensor in tensors.items() if _EMBEDDING.fullmatch(name)}
        return {**heads, **tensors}

    def _together(self, tensors: Iterable[tuple[str, Any]]) -> Iterator[list[tuple[str, Any]]]:
        """Yield the tensors in order, in lists: those that one launch on a GPU makes FP8 of, and each other alone."""
        together: list[tuple[str, Any]] = []
        kind, num_elements = None, 0
        for name, tensor in tensors:
            found = self._launch_kind(name, tensor)
            full = len(together) == _MOST_MATRICES or num_elements + math.prod(tensor.shape) > _MOST_ELEMENTS
            if together and (found is None or found != kind or full):
                yield together
                together, num_elements = [], 0
            kind = found
            together.append((name, tensor))
            num_elements += math.prod(tensor.shape)
        if together:
            yield together

    def _launch_kind(self, name: str, tensor: Any) -> tuple[object, ...] | None:
        """Return what tensors share that one launch can make FP8 of; None where none is made of this one."""
        if not self.is_fp8(name) or isinstance(tensor, np.ndarray) or not tensor.is_floating_point():
            return None
        from rollfeed.weights.serving.fp8 import is_fused

        self._checked_shape(name, tensor)
        scale_type = self._served[self.scale_of(name)].dtype
        return (tensor.dtype, tensor.device, scale_type) if is_fused(tensor, self._block) else None

    def _cast(self, name: str, given: Any) -> Iterator[tuple[str, Any]]:
        self._checked_shape(name, given)
        stored = self._served.get(name)
        if importlib.util.find_spec("torch") is None:
            if self.is_fp8(name):
                raise CheckpointError(f"weight {name!r} is FP8 in the checkpoint, which needs PyTorch: install it")
            yield name, given
            return
        import torch

        tensor: Tensor = torch.as_tensor(given).detach()
        if stored is not None and tensor.is_floating_point():
            if stored.dtype == _FP8:
                yield from self._fp8([(name, tensor)])
                return
            tensor = tensor.to(getattr(torch, TYPES[stored.dtype])) if stored.dtype in TYPES else tensor
        yield name, tensor

    def _fp8(self, tensors: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors in FP8 and their scales; several are of one kind, and made by one launch."""
        import torch

        from rollfeed.weights.serving.fp8 import fused, quantise

        stored = [self._served[self.scale_of(name)] for name, _ in tensors]
        scale_type = getattr(torch, TYPES[stored[0].dtype])
        if len(tensors) > 1:
            assert self._block is not None
            quantised = fused([tensor.detach() for _, tensor in tensors], self._block, scale_type=scale_type)
        else:
            quantised = [quantise(tensors[0][1], self._block, scale_type=scale_type)]
        are_finite = torch.stack([each.scale.isfinite().all() for each in quantised]).tolist()  # one wait for the GPU
        for (name, _), header, each, is_finite in zip(tensors, stored, quantised, are_finite, strict=True):
            if not is_finite:
                raise CheckpointError(f"weight {name!r} has values that are not finite, which FP8 cannot hold")
            yield name, each.codes
            yield self.scale_of(name), each.scale.reshape(header.shape)

    def _checked_shape(self, name: str, tensor: Any) -> tuple[int, ...]:
        shape = tuple(map(int, tensor.shape))
        stored = self._served.get(name)
        if stored is not None and stored.shape != shape:
            raise CheckpointError(
                f"weight {name!r} has the shape {shape}, and servers of this checkpoint hold {stored.shape}: "
                "it is of another model"
            )
        return shape

    def _read_quantization(self, config: Mapping[str, Any], checkpoint: Path, *, is_here: bool) -> None:
        about = config.get("quantization_config")
        if not isinstance(about, dict):
            return
        where = f"{checkpoint / CONFIG_FILE}: quantization_config"
        if (method := about.get("quant_method")) != "fp8":
            raise CheckpointError(f"{where}: weights cannot be published as {method!r}: {_REMEDY}")
        for key, value in (("fmt", "e4m3"), ("activation_scheme", "dynamic"), ("scale_fmt", "float")):
            if (found := about.get(key)) not in (None, value):
                raise CheckpointError(f"{where}: weights cannot be published with {key} {found!r}: {_REMEDY}")
        block = about.get("weight_block_size")
        if block is not None:
            if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
                raise CheckpointError(f"{where}: weight_block_size is {block!r}, no two numbers: fetch the file again")
            self._block = (block[0], block[1])
        if not is_here:
            raise CheckpointError(
                f"{checkpoint}: which weights servers hold in FP8 is not known without the weights: fetch them, too"
            )

    def _check_scales(self, checkpoint: Path | None) -> None:
        names = [name for name in self._served if self.is_fp8(name)]
        if not names:
            return
        from rollfeed.weights.serving.fp8 import scale_shape

        for name in names:
            where, scale = f"{checkpoint}: weight {name!r} is FP8", self.scale_of(name)
            stored = self._served.get(scale)
            if stored is None:
                raise CheckpointError(
                    f"{where} and has no {scale!r}: config.json and the weights are not of one model, or quantised "
                    f"otherwise; {_REMEDY}"
                )
            try:
                expected = scale_shape(self._served[name].shape, self._block)
            except ValueError as error:
                raise CheckpointError(f"{where}: {error}") from None
            if stored.dtype not in TYPES or (stored.shape != expected and (expected or stored.shape != (1,))):
                raise CheckpointError(
                    f"{where} with scales of {stored.shape} {stored.dtype}, where {expected or (1,)} is what "
                    f"config.json says (weight_block_size {self._block}): {_REMEDY}"
                )


def head_of(embedding: str) -> str:
    """Return the name of the output head that embeddings of this name may be tied to; other names are as they are."""
    return _EMBEDDING.sub(r"\1lm_head.weight", embedding)


def _format_type(tensor: Any) -> str:
    """Return the type of a tensor of numpy or torch as the safetensors format calls it."""
    name = str(tensor.dtype).removeprefix("torch.")
    return _NUMPY_TYPES.get(name) or re.sub(r"^(u?)int", lambda found: "U" if found[1] else "I", name)
