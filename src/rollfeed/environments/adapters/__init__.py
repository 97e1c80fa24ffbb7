"""Environments of other packages and of servers, by namespace; a file an adapter."""

from rollfeed.environments.adapters.entries import (
    AdapterEntry,
    adapted_entries,
    adapted_entry,
    known_names,
    not_installed,
)

__all__ = ["AdapterEntry", "adapted_entries", "adapted_entry", "known_names", "not_installed"]
