"""Changes to a model that a recipe may ask for: FP32 islands, padded sizes, channels last, FP8, compilation.

    >>> model = changed(model, TrainConfig(precision="fp16", islands=("head",), pad_to=8))

None changes a parameter's name, shape or value, so weights, data order and checkpoints stay the same. Generated code
contains the source of these functions (`amp_core.tune.codegen`), so each must be self-contained.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map

from amp_core.schema import RunError
from amp_core.settings.training import TrainConfig


def changed(model: torch.nn.Module, config: TrainConfig) -> torch.nn.Module:
    """Apply the changes that `config` asks for to `model`, which is on its device; compile it after this.

    Returns `model`, or a replacement of it. Raises `RunError` for an island that is no module of the model, and for FP8
    without torchao.
    """
    missing = [name for name in config.islands if name not in dict(model.named_modules())]
    if missing:
        names = ", ".join(name for name, _ in model.named_children())
        raise RunError(f"islands={missing[0]!r} is no module of the model; its first ones are {names}")
    if config.channels_last:  # convolutions bring what passes through them into the layout of their weights
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if config.fp8:
        try:
            model = to_fp8(model)
        except ImportError:
            raise RunError("fp8=True needs torchao, which is not installed; pip install torchao") from None
    keep_in_fp32(model, config.islands)
    if config.pad_to is not None:
        pad_linears(model, config.pad_to)
    return model


def keep_in_fp32(model: torch.nn.Module, names: Sequence[str]) -> None:
    """Let these modules compute in FP32 inside autocast, from inputs brought to FP32."""

    def widened(leaf: Any) -> Any:
        return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    def island(inner: Any, *args: Any, **kwargs: Any) -> Any:
        device = next((x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)), "cpu")
        args, kwargs = tree_map(widened, (args, kwargs))
        with torch.autocast(device, enabled=False):
            return inner(*args, **kwargs)

    for name in names:
        module = model.get_submodule(name)
        module.forward = functools.partial(island, module.forward)


def pad_linears(model: torch.nn.Module, multiple: int) -> None:
    """Let linear layers multiply with sizes rounded up to a multiple, which tensor cores like, by rows of zeros."""

    def padded(module: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        wide, high = -module.in_features % multiple, -module.out_features % multiple
        weight = F.pad(module.weight, (0, wide, 0, high))
        bias = F.pad(module.bias, (0, high)) if module.bias is not None else None
        return F.linear(F.pad(x, (0, wide)), weight, bias)[..., : module.out_features]

    for module in model.modules():
        if type(module) is torch.nn.Linear and (module.in_features % multiple or module.out_features % multiple):
            module.forward = functools.partial(padded, module)  # type: ignore[method-assign]


def to_fp8(model: torch.nn.Module) -> torch.nn.Module:
    """Let linear layers whose sizes FP8 tensor cores take, multiples of 16, multiply in FP8."""
    from torchao.float8 import convert_to_float8_training

    def fits(module: torch.nn.Module, name: str) -> bool:  # noqa: ARG001
        return isinstance(module, torch.nn.Linear) and not (module.in_features % 16 or module.out_features % 16)

    made: torch.nn.Module = convert_to_float8_training(model, module_filter_fn=fits)
    return made
