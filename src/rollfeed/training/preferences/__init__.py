"""Models trained on which of two answers is preferred."""
