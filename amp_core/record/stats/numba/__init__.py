"""The statistics on a CPU: numba kernels that run on torch's own threads."""
