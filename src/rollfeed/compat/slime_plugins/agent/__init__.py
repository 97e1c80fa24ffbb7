"""``slime.agent``: adapters, harnesses and sandboxes, upon the gateway and the sandboxes of rollfeed."""
