"""Servers over HTTP as one engine, whatever they speak."""

from rollfeed.engine.client.dialect import Dialect
from rollfeed.engine.client.engine import ServerEngine

__all__ = ["Dialect", "ServerEngine"]
