"""Environments of a run, from its settings."""
