"""Objects in processes of other machines, and what is asked of these."""

from rollfeed.cluster.hosting import Host, HostDiedError, Hosted, Hosting
from rollfeed.cluster.node_checks import NodeNeeds, wanted_of_nodes

__all__ = ["Host", "HostDiedError", "Hosted", "Hosting", "NodeNeeds", "wanted_of_nodes"]
