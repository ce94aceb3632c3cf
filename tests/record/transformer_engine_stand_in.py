"""A stand-in for Transformer Engine's modules, which need a GPU: the same attributes, with the casts computed in torch.

Written from the interface of transformer_engine/pytorch/module/base.py and quantization.py. `Linear` has `fp8_meta`
with a recipe and, per direction, `scale` [tensors] and `amax_history` [steps, tensors], which delayed scaling rolls
after each step: row 0 is the present step, the last row the one before it.
"""

from typing import Any

import torch
from torch import nn

E4M3, E5M2 = (torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)


class DelayedScaling:
    """The recipe's attributes."""

    fp8_format = "Format.HYBRID"

    def __init__(self, amax_history_len: int = 4, margin: int = 0) -> None:
        self.amax_history_len, self.margin = amax_history_len, margin


class _State:
    def __init__(self, recipe: DelayedScaling, tensors: int) -> None:
        self.scale = torch.ones(tensors)
        self.amax_history = torch.zeros(recipe.amax_history_len, tensors)

    def update(self, largest: float) -> None:
        """At the end of a step: scales from the largest amax, and a new row 0."""
        amax = self.amax_history.amax(0)
        self.scale = torch.where(amax > 0, largest / amax, self.scale)
        self.amax_history = torch.roll(self.amax_history, -1, 0)
        self.amax_history[0] = 0


class Linear(nn.Module):
    """`te.Linear` under `fp8_autocast(DelayedScaling())`. `update` ends a step."""

    def __init__(self, inputs: int, outputs: int, recipe: DelayedScaling | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.fp8 = True
        recipe = recipe or DelayedScaling()
        self.fp8_meta: dict[str, Any] = {"recipe": recipe, "num_gemms": 1, "fp8_group": None}
        self.fp8_meta |= {"scaling_fwd": _State(recipe, 3), "scaling_bwd": _State(recipe, 2)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Product.apply(x, self.weight, self.fp8_meta)
        return out

    def update(self) -> None:
        self.fp8_meta["scaling_fwd"].update(E4M3[1])
        self.fp8_meta["scaling_bwd"].update(E5M2[1])


class LayerNormLinear(Linear):
    """`te.LayerNormLinear`: a kernel normalizes the input of the product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.layer_norm(x, x.shape[-1:]))


def cast(values: torch.Tensor, state: _State, index: int, dtype: tuple[torch.dtype, float]) -> torch.Tensor:
    """Quantize with the scale in use, and note the amax."""
    state.amax_history[0, index] = values.abs().max()
    scale = state.scale[index]
    return (values * scale).clamp(-dtype[1], dtype[1]).to(dtype[0]).float() / scale


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, meta: dict[str, Any]) -> torch.Tensor:
        held = cast(x, meta["scaling_fwd"], 0, E4M3), cast(weight, meta["scaling_fwd"], 1, E4M3)
        ctx.save_for_backward(*held)
        ctx.meta = meta
        return held[0] @ held[1].t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        held = cast(grad, ctx.meta["scaling_bwd"], 0, E5M2)
        return held @ weight, held.flatten(0, -2).t() @ x.flatten(0, -2), None
