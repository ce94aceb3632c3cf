"""The machine: this host and its processes (`host`), GPUs by model (`gpus`, `data_sheets`), the NVIDIA driver (`nvml`,
`gpu_state`), names of kernels (`kernel_names`), device types (`device_types`) and the operator lists of their autocast
(`autocast_ops`).

Facts and readings only. Nothing here imports torch, opens a run or interprets a reading.
"""
