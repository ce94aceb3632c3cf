"""Changes to a model that a recipe may ask for: FP32 islands, padded sizes, channels last, 8 and 4 bits.

    >>> model = changed(model, TrainConfig(precision="fp16", islands=("head",), pad_to=8))
    >>> model = changed(model, TrainConfig(precision="nvfp4", keep_bf16=("head", "blocks.11")))

None changes a parameter's name, shape or value, so weights, data order and checkpoints stay the same. Generated code
contains the source of these functions (`amp_core.tune.codegen`), so each must be self-contained.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map

from amp_core.quantization import find_recipe
from amp_core.record.quantized_linear import Rounding, quantized_linear
from amp_core.schema import RunError
from amp_core.settings.training import TrainConfig

_Forward = Callable[[torch.Tensor], torch.Tensor]

FP8_MULTIPLE = 16
"""FP8 tensor cores take matrix sizes that are multiples of this."""


def changed(
    model: torch.nn.Module,
    config: TrainConfig,
    *,
    emulated: bool = True,
    generator: torch.Generator | None = None,
) -> torch.nn.Module:
    """Apply the changes that `config` asks for to `model`, which is on its device; compile it after this.

    `emulated` is whether FP8 products are emulated, `generator` draws the random numbers of stochastic rounding.
    Returns `model`, or a replacement of it. Raises `RunError` for a name that is not a module of the model, for FP8
    without torchao, and for a precision in 8 or 4 bits that would quantize no layer.
    """
    for setting, names in (("islands", config.islands), ("keep_bf16", config.keep_bf16 or ())):
        missing = [name for name in names if name not in dict(model.named_modules())]
        if missing:
            first = ", ".join(name for name, _ in model.named_children())
            raise RunError(f"{setting}={missing[0]!r} is not a module of the model; its first ones are {first}")
    if config.channels_last:  # convolutions bring what passes through them into the layout of their weights
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if config.pad_to is not None:
        pad_linears(model, config.pad_to)
    if config.recipe.quantization is not None:
        model = _quantized(model, config, config.recipe.quantization, emulated, generator)
    keep_in_fp32(model, config.islands)
    return model


def _quantized(
    model: torch.nn.Module, config: TrainConfig, recipe_name: str, emulated: bool, generator: torch.Generator | None
) -> torch.nn.Module:
    """`model` with linear layers that multiply quantized operands inside autocast, and as before outside of it: in the
    FP32 replay of an audit, and in an FP32 island."""
    recipe = find_recipe(recipe_name)
    multiple = recipe.block if isinstance(recipe.block, int) else FP8_MULTIPLE
    names = layers_to_quantize(model, config.keep_bf16, multiple)
    if not names:
        kept = "the head" if config.keep_bf16 is None else ", ".join(config.keep_bf16) or "none"
        raise RunError(
            f"precision={config.precision!r} quantizes linear layers with sizes that are multiples of {multiple}, "
            f"but the model has none (kept in BF16: {kept}); choose bf16"
        )
    plain = {name: model.get_submodule(name).forward for name in names}
    if recipe.by_tensor:
        try:
            model = to_fp8(model, config.keep_bf16, emulated)
        except ImportError:
            raise RunError(
                f"precision={config.precision!r} needs torchao, which is not installed; install the extra fp8, or "
                "pip install torchao"
            ) from None
    rounding = Rounding(recipe, config.stochastic_rounding, config.hadamard, generator)
    multiply = torch.compiler.disable(_multiply)  # a graph supports neither generators nor manual products
    for name in names:
        module = model.get_submodule(name)
        quantized = module.forward if recipe.by_tensor else functools.partial(multiply, module, rounding)
        module.forward = functools.partial(_inside_autocast, plain[name], quantized)
    return model


def _multiply(module: torch.nn.Linear, rounding: Rounding, x: torch.Tensor) -> torch.Tensor:
    out = quantized_linear(x, module.weight, rounding)
    return out + module.bias.to(out.dtype) if module.bias is not None else out


def _inside_autocast(plain: _Forward, quantized: _Forward, x: torch.Tensor) -> torch.Tensor:
    """Call `quantized` with the input in autocast's dtype; outside of an autocast region call `plain`."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return plain(x)
    x = x.to(torch.get_autocast_dtype(device))  # torchao itself does it on CUDA alone
    with torch.autocast(device, enabled=False):
        return quantized(x)


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


def layers_to_quantize(model: torch.nn.Module, keep: Sequence[str] | None, multiple: int) -> list[str]:
    """Names of the linear layers with sizes that are multiples of `multiple`, which matrix units for 8 and 4 bits need,
    outside of the modules named in `keep`; None keeps the last linear layer, usually the head."""
    linear = {name: module for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    kept = list(linear)[-1:] if keep is None else keep
    return [
        name
        for name, module in linear.items()
        if not any(f"{name}.".startswith(f"{one}.") for one in kept)
        and not (module.in_features % multiple or module.out_features % multiple)
    ]


def to_fp8(model: torch.nn.Module, keep: Sequence[str] | None = None, emulated: bool = False) -> torch.nn.Module:
    """Let linear layers multiply in FP8, with torchao: those of sizes that are multiples of 16, except in `keep`."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    names = set(layers_to_quantize(model, keep, 16))
    made: torch.nn.Module = convert_to_float8_training(
        model,
        module_filter_fn=lambda module, name: name in names,  # noqa: ARG005
        config=Float8LinearConfig(emulate=emulated),
    )
    return made
