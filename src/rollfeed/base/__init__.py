"""The ground floor, which knows nothing of rollouts: HTTP servers, atomic files, imports by path, metrics, cores."""
