"""The commands that grade without a run: ``rollfeed score`` and ``rollfeed serve reward``."""
