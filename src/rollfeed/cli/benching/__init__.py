"""Actions of ``rollfeed bench`` with a module of their own."""
