"""Rewards: graders by ``rm_type``, and the hub that calls them or the user's function."""
