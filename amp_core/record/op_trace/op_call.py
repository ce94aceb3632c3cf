"""One operator of a traced step: its inputs and output, and the autocast policy that applied."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from amp_core.hardware import autocast_ops

_WIDE = ("float32", "float64")
_MAX_SHAPES = 8
"""Shapes of longer lists of tensors, such as those of optimizers, are omitted."""


@dataclass
class Call:
    """One operator that ran, with what is derived about it."""

    op: str
    module: str | None
    phase: str
    device: str
    region: str | None
    function: str | None
    in_dtypes: tuple[str, ...]
    out_dtype: str | None
    in_shapes: str | None
    out_bytes: int
    by_engine: bool = False
    cut_short: bool = False
    """Whether it ran in a recomputed forward, which ends as soon as all needed tensors are saved."""
    flops: int | None = None
    storages: tuple[int, ...] = ()
    policy: str | None = None
    cast_by: str | None = None
    cast_of: str | None = None
    cached: int | None = None
    """For a cast that autocast may cache: the address of its result."""
    repeated: int | None = None
    undone: int | None = None
    casts: int = 0
    cast_bytes: int = 0
    hits: int = 0

    @property
    def is_cast(self) -> bool:
        return self.cast_of is not None


def policy_of(call: Call) -> str | None:
    """The policy that applied to a call: that of the Python function around it, else the operator's own."""
    if call.region is None or call.region == "disabled":
        return None
    kind = call.device.partition(":")[0]
    named = autocast_ops.policy(call.function, kind) if call.function is not None else None
    policy = named or autocast_ops.policy(call.op, kind)
    if policy is None:
        return "none"
    if policy == "lower_precision_fp":
        return policy if call.region in call.in_dtypes else "not applied"
    if policy in autocast_ops.FP32_POLICIES:
        return policy if call.out_dtype in _WIDE else "not applied"
    return policy


def cast_source(name: str, args: Sequence[Any], outputs: list[torch.Tensor]) -> torch.Tensor | None:
    """The tensor that a cast between floating-point dtypes converts; None for any other operator."""
    if name == "aten::_to_copy":
        source = args[0]
    elif name == "aten::copy_" and isinstance(args[1], torch.Tensor):
        source = args[1]
    else:
        return None
    both = source.is_floating_point() and outputs[0].is_floating_point()
    return source if both and source.dtype != outputs[0].dtype else None


def tensors_among(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    """The tensors among arguments, including those in lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_among(value)


def shape_of(value: Any) -> list[Any]:
    """The shape of an argument as the profiler writes it: an empty list if it is not a tensor."""
    if isinstance(value, torch.Tensor):
        return [int(n) for n in value.shape]
    if isinstance(value, list | tuple) and 0 < len(value) <= _MAX_SHAPES and isinstance(value[0], torch.Tensor):
        return [shape_of(v) for v in value]
    return []


def storage_of(tensor: torch.Tensor) -> int | None:
    """The address of a tensor's storage; None for tensors that consist of others."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    return tensor.untyped_storage().data_ptr() if plain else None
