"""The command that trains."""
