"""Choice of the server for a request, by what it has computed already and by what it has to do."""

from rollfeed.routing.chooser import Choice, Chooser, HasLoad, RoutingSettings, ServerLoadView
from rollfeed.routing.prefix_tree import PrefixMatch, PrefixTree

__all__ = ["Choice", "Chooser", "HasLoad", "PrefixMatch", "PrefixTree", "RoutingSettings", "ServerLoadView"]
