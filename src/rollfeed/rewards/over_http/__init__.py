"""Rewards over HTTP: what servers are asked, and the server that answers."""
