"""One cast of a tensor to 8 or 4 bits, and what it lost.

    numbers = measure_cast(Cast("weight", None, "fp8-tensorwise", …))        # one vector, still on the device
    cast_losses(numbers.tolist())["underflow_frac"]

A library's cast function is patched during a sampled step (`Source`), so that the values before and after are those of
the training itself. Nothing is quantized a second time.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from amp_core.formats import Format
from amp_core.record.stats.dispatch import by_kernel

ROUNDING = 2.0**-20
"""A scale of amax brings the largest value to the largest of the format but for the rounding of the scale itself."""


class Cast(NamedTuple):
    """A tensor before and after one cast. All tensors have one shape, except for `scales`."""

    kind: str
    """`weight`, `activation` (the layer's input) or `output_grad`."""
    product: str | None
    """The product that it enters: `forward`, `input_grad` or `weight_grad`; None: the cast is the same in all."""
    recipe: str | None
    """A name of `amp_core.quantization.RECIPES`; None for a way of scaling that none of them is."""
    library: str
    element: Format
    block: str
    """Values that share a scale, as `amp_core.quantization.block_name` writes them."""
    values: torch.Tensor | None
    """Before the cast, in their own dtype; None where only a kernel of the library sees them."""
    held: torch.Tensor | None
    """After it, divided by the scale again, in FP32."""
    data: torch.Tensor | None
    """`held` in units of the element: multiplied by its scale. None where values were transformed before the cast, so
    that neither saturation nor underflow can be seen from them."""
    scales: torch.Tensor | None
    """All scales, by which values were multiplied; None where they are not known."""
    scale_age: int | torch.Tensor | None = 0
    """Steps since the amax from which the scale follows was measured; 0: it is that of `values`; None: unknown."""
    amax: torch.Tensor | None = None
    """The amax that the library measured, where `values` are not known."""


class Pass:
    """One forward of a quantized product, and the backward of the same."""

    __slots__ = ("casts", "inside", "name")

    def __init__(self) -> None:
        self.name: str | None = None
        """The layer that made the product; None until its call is over, or if it is not to be recorded."""
        self.casts = 0
        """Casts of the forward, or of the backward, so far."""
        self.inside: str = "forward"


Key = tuple[str, str | None]
"""Kind and product."""


class Source(NamedTuple):
    """A function that casts, where it can be patched."""

    owner: Any
    """The module or class that has it as an attribute."""
    attribute: str
    key_of: Callable[[Pass | None, tuple[Any, ...], dict[str, Any]], Key | None]
    """The kind and product of a call of it; None for one that is not to be recorded."""
    read: Callable[[Key, tuple[Any, ...], dict[str, Any], Any], Cast]
    """The cast from the key, the arguments and the result of a call."""


class Library(NamedTuple):
    """The functions of one library: `products` are subclasses of `torch.autograd.Function` that call the `sources`."""

    products: Sequence[Any]
    sources: Sequence[Source]


LOSSES = ("amax", "nonzero", "underflow", "mass", "lost_mass", "saturated", "sq_sum", "sq_error")
NUMBERS = (*LOSSES, "scale", "scale_max", "scale_age")
"""What is measured of a cast; NaN where it cannot be seen."""


def measure_cast(cast: Cast) -> torch.Tensor:
    """The `NUMBERS` of a cast, a vector of float64; never waits for the device.

    Infinities and NaNs before the cast are left out. Sums are those of torch in float64.
    """
    known = next(t for t in (cast.values, cast.scales, cast.amax) if t is not None)
    unseen = torch.full((), math.nan, dtype=torch.float64, device=known.device)
    if cast.values is None or cast.held is None:
        losses = unseen.repeat(len(LOSSES))
        if cast.amax is not None:
            losses[0] = cast.amax
    else:
        args = cast.values.detach(), cast.held.detach(), cast.data, cast.element.max_value * (1 - ROUNDING)
        packed = by_kernel("casts", known.device.type, *args)
        losses = losses_plain(*args) if packed is None else packed
    scales = cast.scales.detach().to(torch.float32) if cast.scales is not None else unseen
    age = cast.scale_age if isinstance(cast.scale_age, torch.Tensor) else unseen
    return torch.cat([losses, torch.stack([n.to(torch.float64) for n in (scales.amin(), scales.amax(), age)])])


def losses_plain(values: torch.Tensor, held: torch.Tensor, data: torch.Tensor | None, top: float) -> torch.Tensor:
    """The `LOSSES` of a cast in plain torch, a vector of float64. `top` is the least of `data` that is at the top of
    the element's range."""
    finite = values.isfinite()
    values = torch.where(finite, values.to(torch.float32), 0.0)
    held = torch.where(finite, held, 0.0)
    magnitude = values.abs()
    lost = (held == 0) & (magnitude > 0)
    wide = values.to(torch.float64)
    numbers = [magnitude.amax(), (magnitude > 0).sum(), lost.sum(), magnitude.sum(dtype=torch.float64)]
    numbers.append(torch.where(lost, magnitude, 0.0).sum(dtype=torch.float64))
    if data is None:
        numbers[2] = numbers[4] = saturated = wide.new_full((), math.nan)
    else:
        saturated = ((data.abs() >= top) & (magnitude > held.abs() * (1 + ROUNDING))).sum()
    numbers += [saturated, wide.square().sum(), (held.to(torch.float64) - wide).square().sum()]
    return torch.stack([number.to(torch.float64) for number in numbers])


def cast_losses(numbers: Sequence[float]) -> dict[str, Any]:
    """The columns of `quantized` that follow from the `NUMBERS` of a cast."""
    known = {name: None if math.isnan(value) else value for name, value in zip(NUMBERS, numbers, strict=True)}

    def share(part: str, whole: str) -> float | None:
        over, of = known[part], known[whole]
        return over / of if over is not None and of else None if over is None else 0.0

    error = share("sq_error", "sq_sum")
    return {
        "nonzero": int(known["nonzero"]) if known["nonzero"] is not None else None,
        "amax": known["amax"],
        "scale": known["scale"],
        "scale_max": known["scale_max"],
        "saturated_frac": share("saturated", "nonzero"),
        "underflow_frac": share("underflow", "nonzero"),
        "underflow_mass_frac": share("lost_mass", "mass"),
        "sq_error": known["sq_error"],
        "rel_error": math.sqrt(error) if error is not None else None,
    }
