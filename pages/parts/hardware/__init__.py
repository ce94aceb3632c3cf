"""What the machine did and can do: gauges, kernels, precision, memory, ranks."""
