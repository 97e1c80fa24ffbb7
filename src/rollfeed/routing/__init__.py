"""Choice of the server for a request, by what it has computed and has to do; how many there may be at once."""

from rollfeed.routing.adaptive_limit import AdaptiveLimit, Throughput, Window
from rollfeed.routing.affinity import Affinity, belonging, current_affinity
from rollfeed.routing.chooser import Chooser, HasLoad, RoutingSettings, ServerLoadView
from rollfeed.routing.prefix_tree import PrefixTree

__all__ = [
    "AdaptiveLimit",
    "Affinity",
    "Chooser",
    "HasLoad",
    "PrefixTree",
    "RoutingSettings",
    "ServerLoadView",
    "Throughput",
    "Window",
    "belonging",
    "current_affinity",
]
