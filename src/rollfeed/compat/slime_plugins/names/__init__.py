"""The things that slime's names stand for, where slime is not installed; ``supplied`` says which module has which."""
