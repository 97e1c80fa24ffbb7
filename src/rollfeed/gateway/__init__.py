"""Agents that speak to an API as training data: sessions of sampled turns, and their samples."""
