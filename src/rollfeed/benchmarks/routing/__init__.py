"""Conversations of several turns on a fleet of servers, and how the choice of the server changes them."""
