"""What the process says when it ends, for scripts."""

DONE = 0
FAILED = 1
USAGE = 2
"""Wrong usage or input; nothing was started."""
INTERRUPTED = 130
"""By Ctrl-C, as shells say it."""
