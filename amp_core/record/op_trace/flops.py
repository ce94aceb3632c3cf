"""Floating-point operations of matrix products; a multiply-add counts as two.

    >>> flops(torch.ops.aten.mm.default, (a, b), {}, out)       # 2 · M · N · K

Formulas of `torch.utils.flop_counter`, extended by attention on a CPU and recurrent layers. It is imported at first
use, because it imports Triton, whose LLVM conflicts with TensorFlow's in one process.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int | None:
    """Operations of one call; None for operators without a formula, or if it does not fit the call."""
    from torch.utils.flop_counter import flop_registry

    packet = getattr(func, "_overloadpacket", None)
    try:
        own = _OWN.get(str(packet))
        if own is not None:
            return own(args)
        if packet in flop_registry:
            return int(flop_registry[packet](*args, **kwargs, out_val=out))
    except (AssertionError, AttributeError, IndexError, TypeError, ValueError):  # unexpected arguments
        return None
    return None


def _attention(args: Sequence[Any]) -> int:
    from torch.utils.flop_counter import sdpa_flop_count

    query, key, value = (a.shape for a in args[:3])
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(args: Sequence[Any]) -> int:
    from torch.utils.flop_counter import sdpa_backward_flop_count

    grad, query, key, value = (a.shape for a in args[:4])
    return int(sdpa_backward_flop_count(grad, query, key, value))


def _layer(args: Sequence[Any]) -> int:
    """One direction of one recurrent layer: every position of every sample is multiplied by both matrices once."""
    x, from_input, from_state = args[:3]
    return int(2 * x.shape[0] * x.shape[1] * (from_input.numel() + from_state.numel()))


def _stack(args: Sequence[Any]) -> int:
    """All layers and directions of cuDNN's, of which `args[1]` has the weights; biases have one dimension."""
    x, weights = args[:2]
    rows = x.shape[0] * x.shape[1] if x.dim() == 3 else x.shape[0]
    return int(2 * rows * sum(w.numel() for w in weights if w.dim() > 1))


def _convolution_backward(args: Sequence[Any]) -> int:
    """Each gradient takes as much as the convolution; torch's formula does not divide by the groups."""
    grad, given, weight, wanted = args[0], args[1], args[2], args[-1]
    positions = given if args[7] else grad  # a transposed convolution multiplies at each position of its input
    once = 2 * positions.numel() * math.prod(weight.shape[1:])
    return int(once * sum(wanted[:2]))


_OWN: dict[str, Callable[[Sequence[Any]], int]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten.convolution_backward": _convolution_backward,
    "aten.mkldnn_rnn_layer": _layer,
    "aten.mkldnn_rnn_layer_backward": lambda args: 2 * _layer(args),  # the gradients of the input and of the weights
    "aten._cudnn_rnn": _stack,
    "aten._cudnn_rnn_backward": lambda args: 2 * _stack(args),
    "aten.mv": lambda args: 2 * int(args[0].numel()),
    "aten.dot": lambda args: 2 * int(args[0].numel()),
}
"""By the operator's name; each takes the call's positional arguments."""
