"""The statistics on NVIDIA's GPUs: kernels in CUDA C++, compiled by NVRTC, which comes with every CUDA build of torch.

nvrtc: source to machine code · program: loads and launches it · table: what a launch reads
batch, measure: statistics of tensors · blocks: distances below the tops of blocks
"""
