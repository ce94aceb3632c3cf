"""The casts of AMPscope's own emulation, `quantized_linear`: what the engine trains `mxfp8` and `nvfp4` with."""

from collections.abc import Iterator
from typing import Any

import torch

from amp_core.quantization import OPERANDS, Recipe, block_name
from amp_core.record import quantized_linear
from amp_core.record.casts.cast import Cast, Key, Library, Pass, Source
from amp_core.record.fake_quantize import scale_factors


def libraries() -> Iterator[Library]:
    """The one function that quantizes operands, and the product that calls it."""
    cast = Source(quantized_linear, "fake_quantize", _key, _cast)
    yield Library((quantized_linear._QuantizedLinear,), (cast,))


def _key(made_in: Pass | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key | None:
    if made_in is None:
        return None
    kind = kwargs["kind"]
    return kind, OPERANDS[kind][1 if kwargs.get("axis", -1) == 0 else 0]


def _cast(key: Key, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor) -> Cast:
    recipe: Recipe = args[1]
    kind, _ = key
    element = recipe.element_of(kind)
    factors = scale_factors(args[0], recipe, kwargs.get("axis", -1), kind, hadamard=kwargs.get("hadamard", False))
    # After a Hadamard transform the held values are no longer multiples of the element's.
    data = None if kwargs.get("hadamard", False) else result * factors
    block = block_name(recipe.block_of(kind))
    return Cast(*key, recipe.name, "ampscope", element, block, args[0], result, data, factors)
