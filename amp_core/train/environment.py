"""The hardware and software of this machine, what its GPUs and CPU support in 16 bits, and which recipe to try first.

    >>> report = environment()
    >>> report["gpus"][0]["says"], report["advice"]["recipe"]
    ('Tensor cores for FP16, BF16, TF32 and FP8 (Hopper, compute capability 9.0).', 'bf16')

Works without torch too; every recipe then has a note that torch is missing. Unknown numbers are None.
"""

import os
import platform
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import psutil

from amp_core._version import __version__
from amp_core.formats import FORMAT_OF_DTYPE
from amp_core.hardware.gpus import PRECISIONS, Gpu, cpu_abilities, first_recipe, first_recipe_on_cpu, gpu_of
from amp_core.hardware.host import cpu_flags, cpu_name
from amp_core.hardware.nvml import Nvml, NvmlError
from amp_core.settings.catalog import EMULATED
from amp_core.settings.training import RECIPES, Recipe

_PACKAGES = ("torch", "numpy", "pandas", "pyarrow", "scikit-learn", "nvidia-ml-py", "streamlit", "plotly")
_OVERRIDES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUDA_VISIBLE_DEVICES")
"""Environment variables that override settings or hide devices; reported if they are set."""

SLOW_FP16_CPU = "runs, but slowly: this CPU has no FP16 matrix instructions, so choose size tiny"


def environment() -> dict[str, Any]:
    """Everything that `ampscope env` prints, as JSON values."""
    has_torch = find_spec("torch") is not None
    if has_torch:
        import torch
    driver = _driver()
    there = _torch_gpus() if has_torch else []
    gpus = there or driver["gpus"]
    usable = next((gpu for gpu in gpus if gpu["usable"]), None)
    flags = cpu_flags()
    on_gpu = _gpu(usable) if usable is not None else None
    advice = first_recipe(on_gpu) if on_gpu is not None else first_recipe_on_cpu(flags)
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {"ampscope": __version__}
        | {name: _version(name) for name in _PACKAGES}
        | ({"torch": torch.__version__} if has_torch else {}),  # names the build: 2.13.0+cu130; its package says 2.13.0
        "cuda": torch.version.cuda if has_torch else None,
        "cudnn": _cudnn_version() if has_torch else None,
        "driver": driver["version"],
        "driver_cuda": driver["cuda"],
        "nvml": driver["nvml"],
        "cpu": {
            "name": cpu_name(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads() if has_torch else None,
            "capability": torch.backends.cpu.get_cpu_capability() if has_torch else None,
            "memory_bytes": psutil.virtual_memory().total,
            "instructions": cpu_abilities(flags) if flags is not None else None,
        },
        "gpus": gpus,
        "device": (there[0]["device"] if there else "cpu") if has_torch else None,
        "flags": _flags() if has_torch else None,
        "overrides": {name: os.environ[name] for name in _OVERRIDES if name in os.environ},
        "recipes": {recipe.name: _recipe_support(recipe, on_gpu, has_torch) for recipe in RECIPES.values()},
        "advice": {"recipe": advice.recipe, "why": advice.why},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cudnn_version() -> int | None:
    from amp_core.record.backends.cuda import cudnn_version

    return cudnn_version()


def _flags() -> dict[str, Any]:
    """torch's default flags for precision and speed."""
    import torch

    return {
        "matmul_precision": torch.get_float32_matmul_precision(),
        "tf32_matmul": torch.backends.cuda.matmul.allow_tf32,
        "tf32_cudnn": torch.backends.cudnn.allow_tf32,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "fp16_reduced_reduction": torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        "bf16_reduced_reduction": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    }


def _torch_gpus() -> list[dict[str, Any]]:
    from amp_core.record.backends import accelerators

    return [
        _gpu_json(f"{backend.type}:{i}", gpu_of(gpu["name"], gpu["capability"]), gpu["memory_bytes"], usable=True)
        for backend in accelerators()
        for i, gpu in enumerate(backend.gpus())
    ]


def _driver() -> dict[str, Any]:
    """The NVIDIA driver's versions and GPUs, so that a CPU-only torch on a GPU machine is noticed."""
    try:
        with Nvml() as nvml:
            gpus = [
                _gpu_json(f"gpu {i}", Gpu(gpu.name, gpu.capability), gpu.memory_bytes, usable=False)
                for i, gpu in enumerate(nvml.gpus())
            ]
            return {"version": nvml.driver(), "cuda": nvml.cuda(), "nvml": "answers", "gpus": gpus}
    except NvmlError as error:
        return {"version": None, "cuda": None, "nvml": str(error), "gpus": []}


def _gpu_json(device: str, gpu: Gpu, memory_bytes: int | None, *, usable: bool) -> dict[str, Any]:
    """A GPU as JSON values. `tensor_cores` maps each precision to whether tensor cores support it; None if unknown."""
    capability = f"{gpu.capability[0]}.{gpu.capability[1]}" if gpu.capability is not None else None
    return {
        "device": device,
        "name": gpu.name,
        "memory_bytes": memory_bytes,
        "capability": capability,
        "architecture": gpu.architecture,
        "tensor_cores": {precision: gpu.takes(precision) for precision in PRECISIONS},
        "counts_tensor_use": gpu.counts_tensor_use,
        "says": gpu.in_words(),
        "usable": usable,
    }


def _gpu(described: dict[str, Any]) -> Gpu:
    return gpu_of(described["name"], described["capability"])


def _recipe_support(recipe: Recipe, gpu: Gpu | None, has_torch: bool) -> dict[str, Any]:
    if not has_torch:
        return {"runs": False, "note": "needs torch, which is not installed"}
    return {"runs": True, "note": _note_on_cpu(recipe) if gpu is None else _note(recipe, gpu)}


def _note(recipe: Recipe, gpu: Gpu) -> str:
    """How `recipe` runs on a GPU."""
    low = recipe.autocast or (recipe.weights if recipe.weights != "float32" else None)
    if recipe.quantization is not None and not (recipe.in_hardware and gpu.takes(recipe.in_hardware)):
        return EMULATED
    if gpu.has_tensor_cores is None:
        return "runs; support by this GPU's matrix units is unknown"
    if recipe.tf32:
        there = "on tensor cores" if gpu.takes("tf32") else ""
        return there or "the same as fp32: TF32 needs an NVIDIA GPU of compute capability 8.0 or newer"
    if low is None:
        return "native, on CUDA cores"
    if recipe.in_hardware is not None:
        return "on tensor cores, by torchao"
    if gpu.takes(FORMAT_OF_DTYPE[low].name):
        return "on tensor cores"
    if low == "float16":
        return "runs without tensor cores: saves memory but hardly any time"
    return "runs, but emulated: BF16 needs compute capability 8.0 or newer"


def _note_on_cpu(recipe: Recipe) -> str:
    """How `recipe` runs on this CPU."""
    low = recipe.autocast or (recipe.weights if recipe.weights != "float32" else None)
    if recipe.quantization is not None:
        return EMULATED
    if recipe.tf32:
        return "the same as fp32: TF32 needs an NVIDIA GPU of compute capability 8.0 or newer"
    if low is None:
        return "native"
    flags = cpu_flags()
    if flags is None:
        return "runs; this CPU's native support is unknown"
    names = cpu_abilities(flags)[FORMAT_OF_DTYPE[low].name]
    if names:
        return f"native ({', '.join(names)})"
    return SLOW_FP16_CPU if low == "float16" else "runs, but slowly: this CPU has no BF16 instructions"
