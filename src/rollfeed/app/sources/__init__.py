"""Prompt sources from settings: read, checked against what answers and scores them, and where they end."""

from rollfeed.app.sources.building import build_source, environment_source, find_file, source_names

__all__ = ["build_source", "environment_source", "find_file", "source_names"]
