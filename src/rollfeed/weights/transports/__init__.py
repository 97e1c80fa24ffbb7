"""Ways by which tensors of this process reach servers, by name; another one is a file here and a line below."""

from collections.abc import Callable, Mapping

from rollfeed.protocols import TransportContext, WeightTransport
from rollfeed.weights.transports.disk import DiskTransport

TRANSPORTS: Mapping[str, Callable[[TransportContext], WeightTransport]] = {"disk": DiskTransport.made_for}

__all__ = ["TRANSPORTS", "DiskTransport"]
