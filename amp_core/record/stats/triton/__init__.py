"""The statistics on CUDA: Triton kernels, compiled at their first use."""
