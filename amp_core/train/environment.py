"""What this machine has, and which precision recipes run on it.

    >>> environment()["recipes"]["tf32"]
    {'runs': True, 'note': 'the same as fp32: TF32 needs an NVIDIA GPU of compute capability 8.0 or newer'}

Works without torch too, and then says so of every recipe. Numbers that cannot be had are None.
"""

import os
import platform
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import psutil

from amp_core._machine import cpu_name
from amp_core._version import __version__
from amp_core.train.config import RECIPES, Recipe

_PACKAGES = ("torch", "numpy", "pandas", "pyarrow", "scikit-learn", "nvidia-ml-py", "streamlit", "plotly")

SLOW_FP16_CPU = "runs, but slowly: this CPU has no FP16 matrix instructions, so choose size tiny"


def environment() -> dict[str, Any]:
    """Everything that `ampscope env` prints, as JSON has it."""
    has_torch = find_spec("torch") is not None
    if has_torch:
        import torch
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {"ampscope": __version__} | {name: _version(name) for name in _PACKAGES},
        "cuda": torch.version.cuda if has_torch else None,
        "cudnn": _cudnn_version() if has_torch else None,
        "cpu": {
            "name": cpu_name(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads() if has_torch else None,
            "capability": torch.backends.cpu.get_cpu_capability() if has_torch else None,
            "memory_bytes": psutil.virtual_memory().total,
        },
        "gpus": _torch_gpus() or _driver_gpus() if has_torch else _driver_gpus(),
        "device": ("cuda:0" if torch.cuda.is_available() else "cpu") if has_torch else None,
        "recipes": {recipe.name: _verdict(recipe, has_torch) for recipe in RECIPES.values()},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cudnn_version() -> int | None:
    import torch

    if not torch.backends.cudnn.is_available():
        return None
    version: int = torch.backends.cudnn.version()
    return version


def _torch_gpus() -> list[dict[str, Any]]:
    import torch

    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "memory_bytes": properties.total_memory,
                "capability": f"{properties.major}.{properties.minor}",
                "usable": True,
            }
        )
    return gpus


def _driver_gpus() -> list[dict[str, Any]]:
    """GPUs that the driver knows but torch cannot use, so that a CPU-only torch on a GPU machine is noticed."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, no GPU
        return []
    try:
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            gpus.append(
                {
                    "device": f"gpu {index}",
                    "name": pynvml.nvmlDeviceGetName(handle),
                    "memory_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                    "capability": f"{major}.{minor}",
                    "usable": False,
                }
            )
        return gpus
    finally:
        pynvml.nvmlShutdown()


def _verdict(recipe: Recipe, has_torch: bool) -> dict[str, Any]:
    if not has_torch:
        return {"runs": False, "note": "needs torch, which is not installed"}
    import torch

    capability = torch.cuda.get_device_capability(0) if torch.cuda.is_available() else None
    return {"runs": True, "note": _note(recipe, capability, torch)}


def _note(recipe: Recipe, capability: tuple[int, int] | None, torch: Any) -> str:
    """What to expect of `recipe` on a GPU of `capability`, or on the CPU."""
    low = recipe.autocast or (recipe.weights if recipe.weights != "float32" else None)
    if recipe.tf32:
        if capability is not None and capability >= (8, 0):
            return "native"
        return "the same as fp32: TF32 needs an NVIDIA GPU of compute capability 8.0 or newer"
    if low is None:
        return "native"
    if capability is None:
        supported = {
            "float16": torch.ops.mkldnn._is_mkldnn_fp16_supported,
            "bfloat16": torch.ops.mkldnn._is_mkldnn_bf16_supported,
        }[low]()
        slow = SLOW_FP16_CPU if low == "float16" else "runs, but slowly: this CPU has no BF16 instructions"
        return "native" if supported else slow
    if low == "float16":
        return "native" if capability >= (7, 0) else "runs without Tensor Cores: saves memory, hardly time"
    return "native" if capability >= (8, 0) else "runs, but emulated: BF16 needs compute capability 8.0 or newer"
