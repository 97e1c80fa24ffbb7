"""Settings files made of slime's and miles's scripts."""
