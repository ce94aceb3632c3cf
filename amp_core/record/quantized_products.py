"""The three matrix products of linear layers on operands in an 8- or 4-bit format, forward and backward.

    with QuantizedProducts(find_recipe("nvfp4"), model) as products:
        loss = model(x).square().mean()
        loss.backward()                   # the products of backward are quantized too
    assert products.reached == {"fc"}     # names of the layers that ran

Operands are quantized (`quantized_linear`) along the contraction of each product, and multiplied in FP32. It shows what
the numbers of a recipe do on any device, and nothing about its speed. A layer's own forward runs as it is, except for
the product with its weight; a weight that a parametrization computes is not recognized.
"""

from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from amp_core.quantization import Recipe
from amp_core.record.model import own
from amp_core.record.model.modules import is_linear
from amp_core.record.model.parameters import named_modules, unwrapped
from amp_core.record.quantized_linear import Rounding, quantized_linear
from amp_core.record.stats.channels import channel_of


class QuantizedProducts:
    """Quantizes the products of a model's linear layers while it is entered; `only` names the layers, None takes all.

    It stays entered during backward, in which checkpointing runs forward again.
    """

    def __init__(self, recipe: Recipe, model: torch.nn.Module, only: Collection[str] | None = None) -> None:
        self.recipe = recipe
        self.reached: set[str] = set()
        layers = ((name, module) for name, module in named_modules(unwrapped(model)) if is_linear(module))
        self._layers = [(name, module) for name, module in layers if only is None or name in only]
        self._before: list[tuple[dict[str, Any], Any]] = []

    def __enter__(self) -> "QuantizedProducts":
        for name, module in self._layers:
            weight, attributes = own.parameter(module, "weight"), own.attributes(module)
            if weight is not None:
                self._before.append((attributes, attributes.get("forward")))
                outputs_last = (channel_of(module) or (-1, 0))[1] == 1
                attributes["forward"] = self._quantized(name, module.forward, weight, outputs_last)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._before:
            attributes, forward = self._before.pop()
            if forward is None:
                del attributes["forward"]
            else:
                attributes["forward"] = forward

    def _quantized(
        self, name: str, forward: Callable[..., Any], weight: torch.Tensor, outputs_last: bool
    ) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            mode = _Products(self.recipe, weight, outputs_last)
            with mode:
                out = forward(*args, **kwargs)
            if mode.reached:
                self.reached.add(name)
            return out

        return call


class _Products(TorchFunctionMode):
    """Quantizes the products with one weight; with `outputs_last` that is [inputs, outputs], as in GPT-2's `Conv1D`."""

    def __init__(self, recipe: Recipe, weight: torch.Tensor, outputs_last: bool) -> None:
        super().__init__()
        self._recipe, self._weight, self._outputs_last = recipe, weight, outputs_last
        self.reached = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        call = _CALLS.get(func)
        x, matrix, bias = call(*args, **kwargs) if call is not None else (None, None, None)
        if matrix is not self._weight or x is None:
            return func(*args, **kwargs)
        self.reached = True
        out = quantized_linear(x, matrix.mT if self._outputs_last else matrix, Rounding(self._recipe))
        return out if bias is None else out + bias


def _linear(input: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:  # noqa: A002 - torch's names
    return input, weight, bias


def _product(input: Any, other: Any, **options: Any) -> tuple[Any, Any, Any]:  # noqa: A002
    return input, other if not options else None, None


def _sum_and_product(input: Any, mat1: Any, mat2: Any, **options: Any) -> tuple[Any, Any, Any]:  # noqa: A002
    return mat1, mat2 if not options else None, input


_CALLS: dict[Callable[..., Any], Callable[..., tuple[Any, Any, Any]]] = {
    torch.nn.functional.linear: _linear,
    torch.addmm: _sum_and_product,
    **dict.fromkeys((torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__), _product),
}
"""Functions that a linear layer may call, and how their arguments give its input, weight and bias."""
