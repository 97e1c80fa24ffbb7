"""The embedded engine's own CPU kernels: C, compiled on first use for the machine at hand."""
