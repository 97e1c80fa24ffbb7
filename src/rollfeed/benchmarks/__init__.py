"""What ``rollfeed bench`` measures: ratios of one run, never single absolute times."""
