"""2-norms of gradients, and largest magnitudes of outputs: by one kernel, or grouped by device and dtype."""

from collections.abc import Sequence
from operator import attrgetter

import torch

from amp_core.record.backends import widened
from amp_core.record.stats.dispatch import by_kernel

_NARROW = {torch.float32, torch.float16, torch.bfloat16}
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_dtype, _is_cpu = attrgetter("dtype"), attrgetter("is_cpu")


def norms_of_plain(grads: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """What `norms` returns first, of gradients as backward left them; None unless all are dense FP32 tensors on a CPU,
    in memory of their own.

    Made of loops in C alone: it runs in every step, and Python takes more time over a small gradient than its norm.
    """
    if set(map(type, grads)) != {torch.Tensor} or set(map(_dtype, grads)) != {torch.float32}:
        return None
    if not all(map(_is_cpu, grads)) or any(map(torch.Tensor._is_zerotensor, grads)):
        return None
    try:
        if not all(map(torch.Tensor.is_contiguous, grads)):
            return None
    except RuntimeError:  # a sparse tensor
        return None
    return by_kernel("norms", "cpu", grads)


def norms(grads: list[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
    """The 2-norm of each gradient, as one vector on the first one's device, and the index of the gradient of each
    entry.

    One call of a kernel does for all where they are on one device, and on a CPU in FP32. Else gradients of one device
    and dtype come together: a norm each, and one stacking of them, whatever their number. The tensors are real and
    dense: see `local_values`.
    """
    first = grads[0].device
    computed = norms_of_plain(grads)
    if computed is None and first.type != "cpu" and all(g.device == first and g.dtype in _FLOATS for g in grads):
        computed = by_kernel("norms", first.type, grads)
    if computed is not None:
        return computed, list(range(len(grads)))
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, grad in enumerate(grads):
        groups.setdefault((grad.device, grad.dtype), []).append(i)
    parts = []
    for (_, held), members in groups.items():
        # A norm is summed in at least FP32: squares of FP16 gradients overflow FP16.
        wide = torch.float64 if held == torch.float64 else torch.float32
        parts.append(torch.stack(torch._foreach_norm([grads[i] for i in members], 2, dtype=wide)))
    device = grads[0].device
    whole = torch.cat([widened(part.to(device, non_blocking=True)) for part in parts])
    return whole, [i for members in groups.values() for i in members]


def largest(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The largest magnitude of each tensor, all on one device and of 16 bits or more; NaN where a tensor holds one.

    As float32, or as float64 where one of them is that.
    """
    dtypes = set(map(_dtype, tensors))
    if dtypes <= _NARROW:
        computed = by_kernel("largest", tensors[0].device.type, tensors)
        if computed is not None:
            return computed
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    sizes: dict[int, torch.Tensor] = {}
    for dtype in dtypes:
        alike = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        values = [tensors[i].detach() for i in alike]
        sizes |= zip(alike, torch._foreach_norm(values, torch.inf, dtype=wide), strict=True)
    return torch.stack([sizes[i] for i in range(len(tensors))])
