"""The measurements of ``rollfeed bench``: ratios of one run, never single absolute times."""
