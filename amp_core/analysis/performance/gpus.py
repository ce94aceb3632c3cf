"""The GPU that a run was profiled on, and its data sheet rates.

    >>> gpu = profiled_gpu(run, "cuda:0")
    >>> gpu.has_tensor_cores, dense_rates("NVIDIA A100-SXM4-80GB").half
    (True, 312.0)

Rates are the dense peaks of NVIDIA's data sheets and white papers in TFLOP/s (figures given "with sparsity" halved),
16-bit and 8-bit inputs accumulated in FP32, which GeForce cards do at half the rate of FP16 accumulation. No part
sustains them: power limits the clock. For parts sold with different memories the larger one is listed unless the name
says otherwise.
"""

import math
from collections.abc import Mapping
from typing import Any

from amp_core.hardware.data_sheets import dense_rates
from amp_core.hardware.gpus import Gpu, gpu_of
from amp_core.store.run import Run


def profiled_gpu(run: Run, device: str, device_name: str = "") -> Gpu:
    """The GPU called `device` (`cuda:0`), from the run's head; for an imported run possibly only its name."""
    gpus = run.head.environment.get("gpus")
    listed = [gpu for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []
    number = device.partition(":")[2]
    index = int(number) if number.isdecimal() and len(number) < 4 else 0
    about = listed[index] if index < len(listed) else listed[0] if listed else {}
    name = str(about.get("name") or device_name)
    name = _chip(about) or name if dense_rates(name) is None else name
    return gpu_of(_with_memory(name, about.get("memory_bytes")), about.get("capability"))


def _with_memory(name: str, memory_bytes: Any) -> str:
    """The name, with the memory of the GPU where it lacks that and the data sheets tell parts apart by it."""
    if "GB" in name or not isinstance(memory_bytes, int):
        return name
    stated, rates = f"{name} {math.ceil(memory_bytes / 2**30)}GB", dense_rates(name)
    return stated if rates is not None and dense_rates(stated) != rates else name


def is_before_triton(run: Run) -> bool:
    """Whether the GPU of a run is too old for torch.compile's usual backend."""
    gpu = profiled_gpu(run, str(run.head.config.get("device") or ""))
    return gpu.known and gpu.capability is not None and gpu.capability < MIN_TRITON_CAPABILITY


MIN_TRITON_CAPABILITY = (7, 0)
"""From this compute capability on Triton, and with it torch.compile's usual backend, supports GPUs of NVIDIA's."""
_CHIPS = {("7.0", 80): "NVIDIA V100", ("8.0", 108): "NVIDIA A100", ("9.0", 132): "NVIDIA H100 SXM"}
"""Parts by compute capability and multiprocessors: boards of engineers bear numbers as names, and older traces none."""


def _chip(about: Mapping[str, Any]) -> str:
    """The part that a GPU without a name in the data sheets is; empty if that is not known."""
    known = "MIG" not in str(about.get("name"))
    return next(
        (
            name
            for (capability, count), name in _CHIPS.items()
            if known and about.get("capability") == capability and about.get("multiprocessors") == count
        ),
        "",
    )
