"""The embedded engine's models in torch: on GPUs, and on CPUs where the native kernels cannot be compiled."""
