"""Sums over the elements of many tensors: what a step should have changed, and what it did.

    u = exact - before         the update, from a step in float64
    lost = sum |after - exact| / sum |u|

`exact` starts from the weights, gradients and state that the optimizer had, so that only the step itself is judged.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

COLUMNS = (
    "elements",
    "moved",
    "unchanged",
    "mass",
    "lost",
    "net",
    "off",
    "jumps",
    "likely_jumps",
    "squares",
    "squares_before",
    "decay",
    "decayed",
)
"""What `loss_sums` gives for each tensor; see `Sums`."""

OFF_RATIO = 0.1
OFF_ULPS = 2.0
"""A weight differs from the repeated step if it is off by more than this share of the update plus this number of units
in the last place: a step of several operations rounds several times."""
SMALL_UPDATE_ULPS = 0.25
"""Rounding to nearest, even twice, does not let a weight jump for an update below that."""
_EXPONENT_BITS = 0x7FF0_0000_0000_0000
"""Of a float64."""


class Sums(NamedTuple):
    """Sums over the elements of one tensor."""

    elements: float
    moved: float
    """Elements whose update is not zero."""
    unchanged: float
    """Of these, the ones that are as before."""
    mass: float
    """Sum of the magnitudes of updates."""
    lost: float
    """Sum of the magnitudes by which weights differ from the exact ones."""
    net: float
    """Sum of what was made of the updates, in their direction: `mass` where nothing is lost on average."""
    off: float
    """Elements that no rounding of the repeated step explains."""
    jumps: float
    """Elements that changed though their update is far below half a unit in the last place."""
    likely_jumps: float
    """As many as stochastic rounding would let change among these."""
    squares: float
    """Sum of the squares of updates."""
    squares_before: float
    """Sum of the squares of weights before the step."""
    decay: float
    """Sum of the magnitudes of weight decay."""
    decayed: float
    """Sum of what was made of it, in its direction."""


def loss_sums(
    before: Sequence[torch.Tensor],
    after: Sequence[torch.Tensor],
    exact: Sequence[torch.Tensor],
    undecayed: Sequence[torch.Tensor] | None,
    exact_undecayed: Sequence[torch.Tensor] | None,
    resolution: float,
    smallest: float,
) -> torch.Tensor:
    """`COLUMNS` of each tensor, as float64 of shape (tensors, columns), on their device.

    `undecayed` are the weights after a step without weight decay, `exact_undecayed` the same in float64; None without
    weight decay. `resolution` is the distance from 1 to the next larger weight, `smallest` the smallest normal one.
    """
    lengths = [_flat(tensor).numel() for tensor in before]
    start, end, right = (_joined(tensors) for tensors in (before, after, exact))
    update, change = right - start, end - start
    mass, moved, off = update.abs(), update != 0, (end - right).abs()
    ulp = ulps(start, resolution, smallest)
    tolerance = mass.mul(OFF_RATIO).add_(torch.maximum(ulp, ulps(right, resolution, smallest)), alpha=OFF_ULPS)
    small = moved & (mass < ulp * SMALL_UPDATE_ULPS)
    columns = [
        moved,
        moved & (change == 0),
        mass,
        off,
        change * update.sign(),
        off > tolerance,
        small & (change != 0),
        torch.where(small, mass / ulp, 0.0),
        update.square(),
        start.square(),
    ]
    if undecayed is not None and exact_undecayed is not None:
        decay = right - _joined(exact_undecayed)
        columns += [decay.abs(), (end - _joined(undecayed)) * decay.sign()]
    sums = [torch.tensor(lengths, dtype=torch.float64, device="cpu").to(start.device, non_blocking=True)]
    sums += [torch.stack([part.sum() for part in column.split(lengths)]).to(torch.float64) for column in columns]
    sums += [torch.zeros_like(sums[0])] * (len(COLUMNS) - len(sums))
    return torch.stack(sums, dim=1)


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([_flat(tensor).to(torch.float64) for tensor in tensors])


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)


def ulps(values: torch.Tensor, resolution: float, smallest: float) -> torch.Tensor:
    """Units in the last place of float64 values in a format; below its smallest normal number they no longer shrink."""
    powers = values.view(torch.int64) & _EXPONENT_BITS  # |value| rounded down to a power of two
    return powers.view(torch.float64).clamp_min(smallest) * resolution
