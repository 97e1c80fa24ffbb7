"""Checks of instructions that a response can be seen to follow."""
