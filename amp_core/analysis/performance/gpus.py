"""The GPU that a run was profiled on, and its data sheet rates.

    >>> gpu = profiled_gpu(run, "cuda:0")
    >>> gpu.has_tensor_cores, dense_rates("NVIDIA A100-SXM4-80GB").half
    (True, 312.0)

Rates are the dense peaks of NVIDIA's data sheets and white papers in TFLOP/s (figures given "with sparsity" halved),
16-bit and 8-bit inputs accumulated in FP32, which GeForce cards do at half the rate of FP16 accumulation. No part
sustains them: power limits the clock. For parts sold with different memories the larger one is listed unless the name
says otherwise.
"""

from amp_core.hardware.gpus import Gpu, gpu_of
from amp_core.store.run import Run


def profiled_gpu(run: Run, device: str, device_name: str = "") -> Gpu:
    """The GPU called `device` (`cuda:0`), from the run's head; for an imported run possibly only its name."""
    gpus = run.head.environment.get("gpus")
    listed = [gpu for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []
    number = device.partition(":")[2]
    index = int(number) if number.isdecimal() and len(number) < 4 else 0
    about = listed[index] if index < len(listed) else listed[0] if listed else {}
    return gpu_of(about.get("name") or device_name, about.get("capability"))
