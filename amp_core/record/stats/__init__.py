"""Statistics of tensors: one specification, three implementations, one copy to the host.

layout (what is measured, and how it is packed) -> plain (torch) | numba | cuda, chosen by dispatch
channels: largest value per channel · norms · module_outputs: outputs and their gradients · host_transfer
"""
