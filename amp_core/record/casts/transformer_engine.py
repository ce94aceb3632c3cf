"""The casts of Transformer Engine's modules, from their own objects: `fp8_meta`, its recipe, scales and amax history.

    for cast in forward_casts(module, args, weight): ...       # right after the module's forward
    cast = gradient_cast(module, grad)                         # as the gradient of its output arrives

Transformer Engine casts in fused kernels, so what a cast made of a tensor is computed once more here, with the scale in
use. Operands that only a kernel sees, such as the input of LayerNormLinear's product, have their amax and scale alone.
Sources: transformer_engine/pytorch/module/base.py, quantization.py and common/recipe. An entry of
`fp8_meta["scaling_fwd"]` is one tensor: input, weight and output of each product; `scaling_bwd`: gradient of output and
of input. Row 0 of an amax history is the present step, and row i was measured (length - i) steps ago.
"""

from collections.abc import Iterator
from typing import Any

import torch

from amp_core.quantization import ELEMENTS, RECIPES, TENSOR, Recipe, block_name
from amp_core.record.casts.cast import Cast
from amp_core.record.fake_quantize import fake_quantize, scale_factors
from amp_core.record.model import own

_RECIPES = {
    "DelayedScaling": "fp8-delayed",
    "Float8CurrentScaling": "fp8-tensorwise",
    "MXFP8BlockScaling": "mxfp8-e4m3-rceil",
    "Float8BlockScaling": "fp8-block-pow2",
    "NVFP4BlockScaling": "nvfp4-2d",
}
"""Our recipes for the classes of Transformer Engine's."""


def is_quantized(module: torch.nn.Module) -> bool:
    """Whether a module is one of Transformer Engine's and cast its operands in its last forward."""
    return isinstance(own.held(module, "fp8_meta"), dict) and _recipe(module) is not None and _flag(module, "fp8", True)


def is_module(module: torch.nn.Module) -> bool:
    """Whether a module is one of Transformer Engine's that can quantize."""
    return isinstance(own.held(module, "fp8_meta"), dict)


def forward_casts(module: torch.nn.Module, args: tuple[Any, ...], weight: torch.Tensor | None) -> Iterator[Cast]:
    """The casts of the first product's input and weight, after the module's forward."""
    given = next((a for a in args if isinstance(a, torch.Tensor)), None)
    # A norm or another product comes between the module's input and the product's.
    plain = type(module).__name__ in ("Linear", "GroupedLinear")
    yield _cast(module, "activation", given if plain else None, "scaling_fwd", 0)
    yield _cast(module, "weight", weight, "scaling_fwd", 1)


def gradient_cast(module: torch.nn.Module, grad: torch.Tensor) -> Cast:
    """The cast of the gradient of the module's output, which the last product's backward makes."""
    gemms = own.held(module, "fp8_meta").get("num_gemms", 1)
    return _cast(module, "output_grad", grad, "scaling_bwd", 2 * (gemms - 1))


def has_empty_history(module: torch.nn.Module) -> bool:
    """Whether delayed scaling has no amax of any step; waits for the device. Before the first forward there is no
    state, unless a checkpoint brought it."""
    if not is_module(module):
        return False
    meta = own.held(module, "fp8_meta")
    history = getattr(meta.get("scaling_fwd"), "amax_history", None)
    delayed = type(meta.get("recipe")).__name__ in ("DelayedScaling", "NoneType")
    return delayed and (history is None or not bool(history.any()))


def _flag(module: torch.nn.Module, name: str, default: bool) -> bool:
    value = own.held(module, name)
    return bool(value) if value is not None else default


def _recipe(module: torch.nn.Module) -> Recipe | None:
    name = _RECIPES.get(type(own.held(module, "fp8_meta").get("recipe")).__name__)
    return RECIPES[name] if name else None


def _cast(module: torch.nn.Module, kind: str, values: torch.Tensor | None, key: str, index: int) -> Cast:
    meta = own.held(module, "fp8_meta")
    recipe = _recipe(module)
    assert recipe is not None
    hybrid = "HYBRID" in str(getattr(meta.get("recipe"), "fp8_format", "HYBRID"))
    element = recipe.element_of(kind) if hybrid or recipe.gradient_element is None else recipe.element
    if values is not None:
        values = values.detach().flatten(0, -2)
    state = meta.get(key)
    if recipe.history_steps:
        return _delayed(recipe, element.name, kind, values, state, index)
    block = block_name(recipe.block_of(kind))
    if values is None:
        return Cast(kind, None, recipe.name, "transformer_engine", element, block, None, None, None, None)
    product = {"activation": "forward", "weight": "forward", "output_grad": "input_grad"}[kind]
    held, factors = fake_quantize(values, recipe, kind=kind), scale_factors(values, recipe, kind=kind)
    made_in = None if block == TENSOR else product
    return Cast(kind, made_in, recipe.name, "transformer_engine", element, block, values, held, held * factors, factors)


def _delayed(recipe: Recipe, element_name: str, kind: str, values: torch.Tensor | None, state: Any, index: int) -> Cast:
    scale = state.scale[index].detach().clone()
    history = state.amax_history.detach()[:, index]
    earlier = history[1:]
    length = history.shape[0]
    # The scale follows from the largest amax of earlier steps; of several equal ones the last.
    age = torch.arange(length - 1, 0, -1, device=history.device)
    oldest = torch.where(earlier == earlier.amax(), age, length).amin() if length > 1 else age.new_ones(())
    element = ELEMENTS[element_name]
    if values is None:
        amax = history[0].clone()
        return Cast(
            kind, None, recipe.name, "transformer_engine", element, TENSOR, None, None, None, scale, oldest, amax
        )
    dtype = torch.float8_e5m2 if element.name == "fp8-e5m2" else torch.float8_e4m3fn
    wide = (values.to(torch.float32) * scale).clamp(-element.max_value, element.max_value)
    data = wide.to(dtype).to(torch.float32)
    return Cast(
        kind, None, recipe.name, "transformer_engine", element, TENSOR, values, data / scale, data, scale, oldest
    )
