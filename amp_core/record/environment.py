"""The environment of a run: versions, devices, flags, and a summary of the model."""

import itertools
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from amp_core._version import __version__
from amp_core.hardware.gpus import CPU_BF16, CPU_FP16
from amp_core.hardware.host import cpu_flags, cpu_name, slurm_job
from amp_core.record.backends import accelerators, backend_of
from amp_core.record.model import own
from amp_core.record.model import scaler_state as scaling
from amp_core.record.model.modules import computes, layer_class
from amp_core.record.model.parameters import named_modules, named_parameters, written_class
from amp_core.record.stats.layout import dtype_name


def environment() -> dict[str, Any]:
    """Versions, devices, the flags that affect precision and speed, and the Slurm job; without paths and personal
    names."""
    there = accelerators()
    flags = {
        "matmul_precision": _read_flag(torch.get_float32_matmul_precision),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    versions: dict[str, Any] = {"cuda": None, "cudnn": None}
    for backend in there:
        versions |= backend.versions()
        flags |= {name: _read_flag(read) for name, read in backend.flags().items()}
    return {
        "ampscope": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "script": Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "",
        "cpu": cpu_name(),
        "cpu_16bit": _flags_16bit(),
        "threads": torch.get_num_threads(),
        **versions,
        "gpus": [gpu for backend in there for gpu in backend.gpus()],
        "flags": flags,
        "slurm": slurm_job(),
    }


MAX_NAMED = 10_000
"""Modules and parameters that the head of a run describes one by one; a model with more is described as a whole."""


def model_summary(model: torch.nn.Module) -> dict[str, Any]:
    """Class, parameters, their bytes and dtypes, modules. To predict autocast: `layers` (class of each module that has
    parameters or no children), `shapes` of the parameters, and `tied` (further names of a shared parameter, each with
    its first name). Parameters of lazy modules count once they have a shape; `lazy` counts those without."""
    every = list(own.parameters(model))
    parameters = [p for p in every if not is_lazy(p)]
    names = {id(p): n for n, p in named_parameters(model)}
    every_name = named_parameters(model, remove_duplicate=False)
    tied = dict(_first((n, names[id(p)]) for n, p in every_name if names[id(p)] != n))
    dtypes = Counter(dtype_name(p.dtype) for p in parameters)
    return {
        "class": written_class(model).__name__,
        "parameters": sum(p.numel() for p in parameters),
        "trainable": sum(p.numel() for p in parameters if p.requires_grad),
        "parameter_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "tensors_by_dtype": dict(dtypes),
        "modules": sum(1 for _ in own.modules(model)),
        "layers": {name: layer_class(m) for name, m in _first(named_modules(model)) if name and computes(m)},
        "shapes": {n: list(p.shape) for n, p in _first(named_parameters(model)) if not is_lazy(p)},
        "tied": tied,
        **({"lazy": len(every) - len(parameters)} if len(parameters) < len(every) else {}),
    }


def _first(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    return itertools.islice(named, MAX_NAMED)


def recipe_in_use(
    model: torch.nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    scaler: Any,
    autocast_dtype: str | None,
    device: torch.device,
) -> str:
    """The name of the precision recipe that a loop uses, e.g. `fp16` or `fp16-unscaled`.

    It states the dtype in which forward computes, and whether the updated weights have that dtype too (`-pure`). So a
    16-bit model whose optimizer updates FP32 master weights or FP32 adapters is `fp16`, `fp16-unscaled` or `bf16`, like
    autocast over FP32 weights: it computes in 16 bits, and loses no update to rounding.
    """
    stored = {p.dtype for o in optimizers for g in o.param_groups for p in g["params"] if p.requires_grad}
    if autocast_dtype is None and torch.float16 in stored:
        return "fp16-pure"
    if autocast_dtype is None and torch.bfloat16 in stored:
        return "bf16-pure"
    computed = autocast_dtype or stored_in(model)
    if computed == "float16":
        return "fp16" if scaling.is_active(scaler) else "fp16-unscaled"
    if computed == "bfloat16":
        return "bf16"
    return "tf32" if backend_of(device).tf32_matmul() else "fp32"


def stored_in(model: torch.nn.Module) -> str | None:
    """The dtype of most floating-point elements of the parameters, e.g. `float16`; None if there are no such
    parameters."""
    elements: Counter[str] = Counter()
    for parameter in own.parameters(model):
        if parameter.is_floating_point() and not is_lazy(parameter):
            elements[dtype_name(parameter.dtype)] += parameter.numel()
    return elements.most_common(1)[0][0] if elements else None


def with_autocast(config: Mapping[str, Any], autocast_dtype: str | None) -> dict[str, Any]:
    """The settings of a run whose autocast dtype was detected only later: in forward, or in parts of the model."""
    known = dict(config) | {"autocast_dtype": autocast_dtype}
    if autocast_dtype is not None and known.get("precision") in (None, "fp32", "tf32"):
        scaler = known.get("scaler")
        scaled = isinstance(scaler, dict) and scaler.get("enabled")
        half = "fp16" if scaled else "fp16-unscaled"
        known["precision"] = half if autocast_dtype == "float16" else "bf16"
    return known


def _flags_16bit() -> list[str] | None:
    """The processor flags for 16-bit arithmetic; None if unknown."""
    flags = cpu_flags()
    return sorted(flags & (CPU_BF16.keys() | CPU_FP16.keys())) if flags is not None else None


def _read_flag(read: Callable[[], Any]) -> Any:
    """A flag; None if torch refuses to return it, as after a program has set both its older and newer flags."""
    try:
        return read()
    except RuntimeError:
        return None
