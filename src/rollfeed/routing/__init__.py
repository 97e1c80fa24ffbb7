"""Choice of the server for a request, by what it has computed already and by what it has to do."""

from rollfeed.routing.affinity import Affinity, belonging, current_affinity
from rollfeed.routing.chooser import Choice, Chooser, HasLoad, RoutingSettings, ServerLoadView
from rollfeed.routing.prefix_tree import PrefixMatch, PrefixTree

__all__ = [
    "Affinity",
    "Choice",
    "Chooser",
    "HasLoad",
    "PrefixMatch",
    "PrefixTree",
    "RoutingSettings",
    "ServerLoadView",
    "belonging",
    "current_affinity",
]
