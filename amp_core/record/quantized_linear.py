"""The three matrix products of a linear layer on operands in 8 or 4 bits, forward and backward.

    >>> y = quantized_linear(x, layer.weight, Rounding(find_recipe("nvfp4"), stochastic=True, hadamard=True))

The operands are quantized by `fake_quantize` along the contraction of each product, and multiplied in FP32: what
hardware for such formats computes, up to the order of its sums, on any device. It takes longer than a plain product.
"""

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from amp_core.quantization import Recipe
from amp_core.record.fake_quantize import fake_quantize


class Rounding(NamedTuple):
    """How operands are quantized."""

    recipe: Recipe
    stochastic: bool = False
    """Round output gradients up or down at random, in both products of backward."""
    hadamard: bool = False
    """Transform both operands of the weight gradient's product, by a random Hadamard transform of 16."""
    generator: torch.Generator | None = None
    """Draws the random numbers of `stochastic`; None: torch's own of the device."""


def quantized_linear(x: torch.Tensor, weight: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """x [..., inputs] times the transpose of the weight [outputs, inputs], in the dtype of x; differentiable once.

    The weight is quantized from its own dtype: FP32 masters are not rounded to 16 bits before.
    """
    result: torch.Tensor = _QuantizedLinear.apply(x, weight, rounding)  # type: ignore[no-untyped-call]
    return result


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, rounding: Rounding) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rounding = rounding
        held = fake_quantize(x, rounding.recipe, kind="activation")
        return _product(held, fake_quantize(weight, rounding.recipe, kind="weight").mT).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        recipe, stochastic, hadamard, generator = ctx.rounding
        grad_x = grad_weight = None
        rows, tokens = (t.reshape(-1, t.shape[-1]) for t in (grad, x))
        if ctx.needs_input_grad[0]:
            held = fake_quantize(rows, recipe, stochastic=stochastic, generator=generator, kind="output_grad")
            grad_x = _product(held, fake_quantize(weight, recipe, axis=0, kind="weight"))
            grad_x = grad_x.reshape(x.shape).to(x.dtype)
        if ctx.needs_input_grad[1]:
            held = fake_quantize(
                rows,
                recipe,
                axis=0,
                stochastic=stochastic,
                hadamard=hadamard,
                generator=generator,
                kind="output_grad",
            )
            inputs = fake_quantize(tokens, recipe, axis=0, hadamard=hadamard, kind="activation")
            grad_weight = _product(held.mT, inputs).to(weight.dtype)
        return grad_x, grad_weight, None


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product in FP32, also inside an autocast region."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b
