"""Time, memory and kernels of a run: parts of a step's time, use of tensor cores, parts of memory."""
