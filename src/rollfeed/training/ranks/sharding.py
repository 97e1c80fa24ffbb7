"""A model whose parameters, gradients and moments are spread over ranks, each with some rows of every tensor.

Decoder layers are gathered one at a time, as they are computed; what is around them (embeddings, the last norm and the
head) for a whole pass. Source: FSDP, arXiv:2304.11277, in the form of ``torch.distributed.fsdp.fully_shard``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rollfeed.model_files.low_rank import adapted_layers

_TAKES_OTHER_TYPES = torch.__version__ >= "2.9"
"""Whether weights that are not trained may be of another type: https://github.com/pytorch/pytorch/pull/154103."""
BUCKET_BYTES = 1 << 28
"""Of whole tensors that one rank holds at a time when the model is written; a larger tensor is alone."""


def shard(
    model: Any,
    *,
    device: torch.device,
    num_ranks: int,
    computes_in: torch.dtype | None,
    head_in: torch.dtype | None = None,
) -> None:
    """Keep on each rank its rows of the model only, on its device; the model is whole and on the CPU before.

    Weights are gathered in ``computes_in``, by default in their own type; what is around the layers in ``head_in``, by
    default as the layers. Gradients are added up in fp32, and are the mean over the ranks.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (num_ranks,))

    def precision(dtype: torch.dtype | None) -> MixedPrecisionPolicy:
        # Autocast goes on choosing what is computed in which type, as in one process.
        return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)

    for parameter in () if _TAKES_OTHER_TYPES else model.parameters():
        parameter.data = parameter.data.float()
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=precision(computes_in))
    fully_shard(model, mesh=mesh, mp_policy=precision(head_in or computes_in))


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    """Return the decoder's layers: the longest list of modules by their parameters."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return list(max(lists, key=lambda each: sum(p.numel() for p in each.parameters()), default=()))


def let_go(model: Any) -> None:
    """Give up what passes without gradient have gathered, which would be there, as it was, after an update."""
    if isinstance(model, FSDPModule):
        model.reshard()


def wholes(tensors: Mapping[str, Tensor], *, bucket_bytes: int = BUCKET_BYTES) -> Iterator[dict[str, Tensor]]:
    """Yield tensors whole and on the CPU, in their order, about ``bucket_bytes`` at a time.

    Of tensors that are spread over ranks, rank 0 alone is given anything; all of them have to ask.
    """
    bucket: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if bucket and sum(each.nbytes for each in (*bucket.values(), tensor)) > bucket_bytes:
            yield _gathered(bucket)
            bucket = {}
        bucket[name] = tensor.detach()
    if bucket:
        yield _gathered(bucket)


def _gathered(bucket: Mapping[str, Tensor]) -> dict[str, Tensor]:
    spread = {name: tensor for name, tensor in bucket.items() if isinstance(tensor, DTensor)}
    if not spread:
        return {name: tensor.cpu() for name, tensor in bucket.items()}
    mesh = next(iter(spread.values())).device_mesh
    own = torch.cat([_padded(tensor) for tensor in spread.values()])
    if mesh.get_local_rank() != 0:
        dist.gather(own, dst=0, group=mesh.get_group())
        return {}
    received = [torch.empty_like(own) for _ in range(mesh.size())]
    dist.gather(own, received, dst=0, group=mesh.get_group())
    found, start = dict[str, Tensor](), 0
    for name, tensor in bucket.items():
        if not isinstance(tensor, DTensor):
            found[name] = tensor.cpu()
            continue
        whole = torch.empty((mesh.size() * _rows(tensor), *tensor.shape[1:]), dtype=tensor.dtype)
        parts = whole.reshape(-1).view(torch.uint8).chunk(mesh.size())
        for part, bytes_ in zip(parts, received, strict=True):
            part.copy_(bytes_[start : start + len(part)])
        start += len(parts[0])
        found[name] = whole[: tensor.shape[0]]
    return found


def _rows(tensor: DTensor) -> int:
    """Return the rows of every rank but the last ones, which have fewer or none."""
    return -(-tensor.shape[0] // tensor.device_mesh.size())


def _padded(tensor: DTensor) -> Tensor:
    own = tensor.to_local()
    rows = own.new_zeros((_rows(tensor), *tensor.shape[1:]))
    rows[: len(own)] = own
    return rows.reshape(-1).view(torch.uint8)


def fill(tensor: Tensor, whole: Tensor) -> None:
    """Copy values into a tensor, or into this rank's rows of it."""
    with torch.no_grad():
        if not isinstance(tensor, DTensor):
            tensor.copy_(whole)
            return
        own, start = tensor.to_local(), tensor.device_mesh.get_local_rank() * _rows(tensor)
        own.copy_(whole[start : start + len(own)])


def total_norm(tensors: Iterable[Tensor]) -> float:
    """Return the norm of all tensors together, whoever holds them."""
    norm = torch.nn.utils.get_total_norm(list(tensors))
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def empty_copy(model: Any) -> Any:
    """Return a copy of a model that has no memory of its own for parameters, to be computed with in full precision.

    When the model has been spread over ranks, each module of the copy is given the model's weights while it computes, a
    layer with an adapter that, too; all ranks have to compute the same.
    """
    without = {id(each): torch.nn.Parameter(each.detach().to("meta"), False) for each in model.parameters()}
    copy = deepcopy(model, without)
    modules = dict(model.named_modules())

    def take(name: str, module: Any, meta: Mapping[str, Any]) -> None:
        def put(own: str, parameter: Any) -> None:
            place, _, its = own.rpartition(".")
            module.get_submodule(place)._parameters[its] = parameter

        def gather(*_: Any) -> None:
            for own in meta:
                whole = modules[name].get_parameter(own).detach()
                whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
                put(own, torch.nn.Parameter(whole, requires_grad=False))

        def let_go(*_: Any) -> None:
            for own, parameter in meta.items():
                put(own, parameter)

        module.register_forward_pre_hook(gather)
        module.register_forward_hook(let_go, always_call=True)

    adapted = adapted_layers(copy)
    parts = {part for layer in adapted for part in layer.modules() if part is not layer}
    for name, module in copy.named_modules():
        own = dict(module.named_parameters(recurse=module in adapted))
        if own and module not in parts:
            take(name, module, own)
    return copy
