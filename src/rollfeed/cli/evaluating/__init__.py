"""The commands that measure a policy: ``rollfeed eval`` and ``rollfeed env calibrate``."""
