"""The GPU that a run was profiled on, and the dense rates that its data sheet promises.

    >>> gpu = profiled_gpu(run, "cuda:0")
    >>> gpu.has_tensor_cores, dense_rates("NVIDIA A100-SXM4-80GB").half
    (True, 312.0)

Rates are the dense peaks of NVIDIA's data sheets and white papers in TFLOP/s (figures given "with sparsity" halved),
16-bit inputs accumulated in FP32. No part holds them for long: power sets the clock.
"""

import re
from dataclasses import dataclass

from amp_core.hardware import Gpu, gpu_of
from amp_core.run import Run


@dataclass(frozen=True)
class Rates:
    """Dense peaks of one part in TFLOP/s; None where there is no such unit."""

    fp32: float
    """On CUDA cores."""
    tf32: float | None
    half: float
    """FP16, and BF16 where the tensor cores take it."""

    def of(self, precision: str) -> float | None:
        """The peak for inputs of this precision; None where it is not listed."""
        return {"fp32": self.fp32, "tf32": self.tf32, "fp16": self.half, "bf16": self.half}.get(precision)


_RATES = (  # the first pattern that fits the name counts
    (r"V100.*PCI", Rates(14.0, None, 112.0)),
    (r"V100", Rates(15.7, None, 125.0)),
    (r"TITAN RTX", Rates(16.3, None, 130.5)),
    (r"(Tesla|NVIDIA) T4\b", Rates(8.1, None, 65.0)),
    (r"RTX 2080 Ti", Rates(13.4, None, 53.8)),
    (r"A100", Rates(19.5, 156.0, 312.0)),
    (r"\bA30\b", Rates(10.3, 82.0, 165.0)),
    (r"\bA10\b", Rates(31.2, 62.5, 125.0)),
    (r"\bA40\b", Rates(37.4, 74.8, 149.7)),
    (r"RTX A6000", Rates(38.7, 77.4, 154.8)),
    (r"RTX 3090(?! Ti)", Rates(35.6, 35.6, 71.0)),
    (r"RTX 4090(?! D)", Rates(82.6, 82.6, 165.2)),
    (r"RTX 6000 Ada", Rates(91.1, 182.1, 364.2)),
    (r"\bL4\b", Rates(30.3, 60.0, 121.0)),
    (r"\bL40S\b", Rates(91.6, 183.0, 362.0)),
    (r"\bL40\b", Rates(90.5, 90.5, 181.0)),
    (r"H100 PCIe", Rates(51.2, 378.0, 756.0)),
    (r"H100 NVL", Rates(60.0, 417.5, 835.0)),
    (r"H100|\bH200\b", Rates(66.9, 494.7, 989.4)),
    (r"\bH20\b", Rates(44.0, 74.0, 148.0)),
    (r"\bB200\b", Rates(75.0, 1125.0, 2250.0)),
)


def dense_rates(name: str) -> Rates | None:
    """Dense peaks of the part of this name; None for one that is not listed, and for a slice of one (MIG)."""
    if "MIG" in name:
        return None
    return next((rates for pattern, rates in _RATES if re.search(pattern, name)), None)


def profiled_gpu(run: Run, device: str, device_name: str = "") -> Gpu:
    """The GPU called `device` (`cuda:0`), from the run's head; of a foreign run perhaps its name alone."""
    gpus = run.head.environment.get("gpus")
    listed = [gpu for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []
    number = device.partition(":")[2]
    index = int(number) if number.isdecimal() and len(number) < 4 else 0
    about = listed[index] if index < len(listed) else listed[0] if listed else {}
    return gpu_of(about.get("name") or device_name, about.get("capability"))
