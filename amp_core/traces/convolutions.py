"""How many floating-point operations a forward convolution has, by its recorded shapes and arguments.

>>> convolution_flops("aten::convolution", [[1, 3, 8, 8], [4, 3, 3, 3]], ["", "", "", "[2, 2]", "[1, 1]", "[1, 1]"])
3456

The input shapes alone do not tell it, since the size of the output depends on stride, padding and dilation.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class _Places:
    """Where an operator has these arguments among its inputs (native_functions.yaml)."""

    stride: int
    padding: int
    dilation: int | None = None
    transposed: int | None = None


_PLACES = {
    "convolution": _Places(3, 4, 5, 6),
    "_convolution": _Places(3, 4, 5, 6),
    "convolution_overrideable": _Places(3, 4, 5, 6),
    "conv1d": _Places(3, 4, 5),
    "conv2d": _Places(3, 4, 5),
    "conv3d": _Places(3, 4, 5),
    "cudnn_convolution": _Places(3, 2, 4),
    "cudnn_convolution_relu": _Places(3, 4, 5),
    "cudnn_convolution_add_relu": _Places(5, 6, 7),
    "miopen_convolution": _Places(4, 3, 5),
    "miopen_convolution_relu": _Places(3, 4, 5),
    "miopen_convolution_add_relu": _Places(5, 6, 7),
    "miopen_depthwise_convolution": _Places(4, 3, 5),
    "mkldnn_convolution": _Places(4, 3, 5),
    "_conv_depthwise2d": _Places(4, 5, 6),
    "conv_depthwise3d": _Places(4, 5, 6),
    "_slow_conv2d_forward": _Places(4, 5),
    "slow_conv3d_forward": _Places(4, 5),
    "slow_conv_dilated2d": _Places(4, 5, 6),
    "slow_conv_dilated3d": _Places(4, 5, 6),
    "thnn_conv2d": _Places(4, 5),
}
_NUMBER = re.compile(r"-?\d+")


def convolution_flops(op: str, dims: object, inputs: object) -> int | None:
    """The operations of one call of the operator `op` with inputs of these sizes and concrete values; None for other
    operators and where they do not tell it."""
    places = _PLACES.get(op.removeprefix("aten::"))
    if places is None or not isinstance(dims, list) or not isinstance(inputs, list):
        return None
    given, weight = (_sizes(dims[at]) if len(dims) > at else () for at in (0, 1))
    spatial = len(weight) - 2
    if spatial < 1 or len(given) != len(weight) or not weight[1]:
        return None
    taps = math.prod(weight[2:])
    if places.transposed is not None and len(inputs) > places.transposed and str(inputs[places.transposed]) == "True":
        return 2 * math.prod(given) * weight[1] * taps
    stride, padding = (_each(inputs, at, spatial) for at in (places.stride, places.padding))
    dilation = (1,) * spatial if places.dilation is None else _each(inputs, places.dilation, spatial)
    if stride is None or padding is None or dilation is None or min(stride) < 1:
        return None
    sides = zip(given[2:], weight[2:], stride, padding, dilation, strict=True)
    output = [(size + 2 * pad - step * (kernel - 1) - 1) // by + 1 for size, kernel, by, pad, step in sides]
    return 2 * given[0] * math.prod(output) * weight[0] * weight[1] * taps if min(output) > 0 else None


def _sizes(item: object) -> tuple[int, ...]:
    fine = isinstance(item, list) and all(isinstance(size, int) and size >= 0 for size in item)
    return tuple(item) if fine and isinstance(item, list) else ()


def _each(inputs: Sequence[object], at: int, sides: int) -> tuple[int, ...] | None:
    """An argument with one number for each side, or one for all; None where it is not recorded or a word."""
    numbers = tuple(map(int, _NUMBER.findall(str(inputs[at])))) if len(inputs) > at else ()
    return numbers if len(numbers) == sides else numbers * sides if len(numbers) == 1 else None
