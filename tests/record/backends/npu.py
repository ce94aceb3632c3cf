"""A device type without an AMPscope backend, `npu`, emulated on the CPU: torch sees its tensors on `npu:0`. They have
values, autograd and optimizers. As on some accelerators, float64 is not supported.

    >>> install()
    >>> torch.ones(3, device="npu").sum().item()
    3.0
"""

from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_map

SUPPORTED = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


class NpuTensor(torch.Tensor):
    """A tensor on `npu:0` whose values are in a CPU tensor, `raw`."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> "NpuTensor":
        if raw.dtype is torch.float64:
            raise TypeError("npu has no float64")
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, raw.shape, raw.stride(), raw.storage_offset(), dtype=raw.dtype, device="npu:0"
        )
        tensor.raw = raw
        return tensor

    def __repr__(self) -> str:
        return f"NpuTensor({self.raw})"

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(op, *args, **(kwargs or {}))


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    wrappers: dict[int, NpuTensor] = {}

    def on_cpu(value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == "npu":
            return torch.device("cpu")
        if not isinstance(value, NpuTensor):
            return value
        wrappers[id(value.raw)] = value
        return value.raw

    def on_npu(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        # An in-place operator returns the same tensor.
        return wrappers[id(value)] if id(value) in wrappers else NpuTensor(value)

    device = kwargs.get("device")
    out = op(*tree_map(on_cpu, args), **tree_map(on_cpu, kwargs))
    return out if device is not None and torch.device(device).type == "cpu" else tree_map(on_npu, out)


def install() -> torch.library.Library:
    """Register `npu` with torch, for this process; keep the returned objects alive."""
    backend_registration._setup_privateuseone_for_python_backend("npu")
    library = torch.library.Library("_", "IMPL")
    library.fallback(_run, "PrivateUse1")  # for operators that create tensors; the others reach `__torch_dispatch__`
    return library
