"""Prompt sources from settings: read, checked against what answers and scores them, and where they end."""
