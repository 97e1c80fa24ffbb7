"""Ways by which tensors of this process reach servers, by name; another one is a file here and a line below."""

from collections.abc import Callable, Mapping

from rollfeed.protocols import TransportContext, WeightTransport
from rollfeed.weights.transports.disk import DiskTransport


def _delta(context: TransportContext) -> WeightTransport:
    from rollfeed.weights.transports.delta import DeltaTransport  # here, as the next ones, because it brings more

    return DeltaTransport(context)


def _tensors(context: TransportContext) -> WeightTransport:
    from rollfeed.weights.transports.tensors import TensorTransport  # which brings torch

    return TensorTransport(context)


def _broadcast(context: TransportContext) -> WeightTransport:
    from rollfeed.weights.transports.nccl import BroadcastTransport

    return BroadcastTransport(context)


def _adapter(context: TransportContext) -> WeightTransport:
    from rollfeed.weights.transports.adapter import AdapterTransport

    return AdapterTransport(context)


TRANSPORTS: Mapping[str, Callable[[TransportContext], WeightTransport]] = {
    "adapter": _adapter,
    "delta": _delta,
    "disk": DiskTransport.made_for,
    "nccl": _broadcast,
    "tensors": _tensors,
}

__all__ = ["TRANSPORTS", "DiskTransport"]
