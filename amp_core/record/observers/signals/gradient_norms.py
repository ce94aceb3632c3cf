"""Norms of gradients, on their device.

>>> norms_of([torch.tensor([3.0, 4.0]), torch.tensor([12.0])])
tensor([ 5., 12., 13.], dtype=torch.float64)
"""

from collections.abc import Sequence

import torch


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a parameter; None without one, and for one that is not a plain tensor with values."""
    grad = parameter.grad
    return grad if type(grad) is torch.Tensor and grad.layout is torch.strided and grad.numel() else None


def norms_of(grads: list[torch.Tensor]) -> torch.Tensor:
    """The norm of each gradient, and of all together, on the device of the first."""
    with torch.no_grad():
        # In float64, where the largest float32 has a square.
        norms = torch.stack([n.to(grads[0].device) for n in torch._foreach_norm(grads, dtype=torch.float64)])
        return torch.cat([norms, norms.norm().reshape(1)])


def norm_of(parameters: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The norm of all gradients together; None without any."""
    grads = [g for p in parameters if (g := gradient_of(p)) is not None]
    return norms_of(grads)[-1] if grads else None
