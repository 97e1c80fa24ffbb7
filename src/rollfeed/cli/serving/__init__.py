"""The commands that serve: ``rollfeed serve engine`` and ``rollfeed serve fake-sglang``."""
