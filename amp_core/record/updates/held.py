"""What an optimizer holds of its parameters before a step: copies of weights, gradients and state.

    >>> parts = list(parts_of(optimizer, names, 2**22, narrow_only=True))
    >>> parts[0].name, parts[0].weight.dtype
    ('head.weight', torch.bfloat16)

Of large tensors evenly spaced elements are taken. That is right only where an optimizer treats each element on its own;
`replay` tests it.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from amp_core.record.model.parameters import has_values
from amp_core.record.updates import bitsandbytes_steps

MAX_ELEMENTS_OF_ONE = 2**20
"""Elements of one tensor that are taken: a share of them is known within 0.0005, one standard deviation."""


@dataclass
class Part:
    """One parameter: the elements that were taken, as they were before the step."""

    name: str
    parameter: torch.Tensor
    group: int
    """Index of its parameter group."""
    taken: int
    """How many elements are taken."""
    weight: torch.Tensor
    """In the dtype of the parameter: of the parameter's shape if all elements are taken, else flat."""
    grad: torch.Tensor
    """The gradient that the optimizer uses."""
    version: int = 0
    """How often the parameter had been written to."""
    state: dict[str, Any] = field(default_factory=dict)
    """The optimizer's state: tensors of the parameter's shape likewise, others whole. Quantised states are
    dequantized."""

    @property
    def whole(self) -> bool:
        """Whether all elements of the parameter are taken; never of one that is sharded over processes."""
        return self.taken == self.parameter.numel()

    def now(self) -> torch.Tensor:
        """The same elements of the parameter, as they are now."""
        return spaced(local(self.parameter), self.taken)

    def state_now(self, optimizer: torch.optim.Optimizer, key: str) -> torch.Tensor:
        """The same elements of a tensor of the optimizer's state, as they are now."""
        return spaced(plain(optimizer.state[self.parameter][key]), self.taken)


def parts_of(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], max_elements: int, *, narrow_only: bool
) -> Iterator[Part]:
    """The parts of all parameters that have a gradient, with at most about `max_elements` elements together.

    `names` are those of parameters, by `id`. `narrow_only`: of parameters of less than 32 bits alone.
    """
    grouped = [(i, p) for i, group in enumerate(optimizer.param_groups) for p in group["params"]]
    wanted = [
        (number, i, p)
        for number, (i, p) in enumerate(grouped)
        if p.grad is not None
        and has_values(p)
        and p.grad.layout is torch.strided
        and (p.dtype.is_floating_point or p.dtype.is_complex)
        and not (narrow_only and p.element_size() >= 4)
        and local(p).numel()
    ]
    limit = even_limit([local(p).numel() for _, _, p in wanted], max_elements)
    for number, group, parameter in wanted:
        name = names.get(id(parameter), f"parameter {number}")
        yield part_of(optimizer, name, parameter, group, min(limit, MAX_ELEMENTS_OF_ONE))


def part_of(
    optimizer: torch.optim.Optimizer, name: str, parameter: torch.Tensor, group: int, max_elements: int
) -> Part:
    """At most `max_elements` elements of one parameter of group number `group`."""
    own = local(parameter)
    taken = min(own.numel(), max_elements)
    grad = parameter.grad
    assert grad is not None
    return Part(
        name=name,
        parameter=parameter,
        group=group,
        taken=taken,
        weight=spaced(own, taken).clone(),
        grad=_unscaled(spaced(local(grad), taken), optimizer),
        version=parameter._version,
        state={key: _taken(v, own.shape, taken) for key, v in _state_of(optimizer, parameter).items()},
    )


def _state_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    if bitsandbytes_steps.is_known(optimizer):
        return bitsandbytes_steps.state_of(optimizer, parameter)
    state: dict[str, Any] = optimizer.state.get(parameter, {})
    return state


def even_limit(sizes: list[int], total: int) -> int:
    """The most elements to take of each tensor so that all together are at most `total`: small ones are taken whole.

    >>> even_limit([10, 10, 1000], 120)
    100
    """
    left, waiting = total, sorted(sizes)
    while waiting:
        share = left // len(waiting)
        if waiting[0] > share:
            return max(1, share)
        left -= waiting.pop(0)
    return total


def spaced(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """`count` evenly spaced elements of a tensor, flat; the tensor as it is if that are all.

    The spacing has no factor in common with the length of the rows, so that elements of all columns are among them.
    """
    if count >= tensor.numel():
        return tensor
    spacing = tensor.numel() // count
    while spacing > 1 and math.gcd(spacing, tensor.shape[-1]) > 1:
        spacing -= 1
    return tensor.reshape(-1)[::spacing][:count]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor that this process holds."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def plain(value: torch.Tensor) -> torch.Tensor:
    """`local`, and dequantized where a state is kept in 8 or 4 bits by a tensor subclass."""
    own = local(value)
    return own.dequantize() if type(own) is not torch.Tensor and hasattr(own, "dequantize") else own


def _taken(value: Any, shape: torch.Size, count: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value) if type(value) in (dict, list, set) else value
    own = plain(value)
    return spaced(own, count).clone() if own.shape == shape else own.clone()


def _unscaled(grad: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """A fused optimizer is given scaled gradients, and by what they were scaled."""
    scale = getattr(optimizer, "grad_scale", None)
    return grad.clone() if scale is None else grad.to(torch.float64) / scale.to(grad.device, torch.float64)
