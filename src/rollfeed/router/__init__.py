"""One address for many servers, which knows policy versions, groups, sessions and aborts."""
