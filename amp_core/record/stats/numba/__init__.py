"""The statistics on a CPU: numba kernels that share their work between torch's threads."""
