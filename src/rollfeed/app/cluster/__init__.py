"""A run whose groups are answered and scored on other machines: both sides, and what they tell each other."""

from rollfeed.app.cluster.engine import ClusterEngine
from rollfeed.app.cluster.runner import RemoteRunner
from rollfeed.app.cluster.shares import cluster_engine, settings_here

__all__ = ["ClusterEngine", "RemoteRunner", "cluster_engine", "settings_here"]
