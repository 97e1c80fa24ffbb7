"""``rollfeed bench gateway``: what a turn of a black-box agent costs the gateway, beside a server that echoes.

Nothing is imported here: the agents and the server that echoes are processes that need little of it.
"""
