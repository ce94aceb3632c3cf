"""Reading the casts to 8 and 4 bits that libraries make: torchao, Transformer Engine and AMPscope's own emulation."""
