"""``rollfeed bench train``: what a step of training takes, and what of it the matrix products need."""
