"""The values that a tensor would hold in an 8- or 4-bit format, in FP32.

    >>> fake_quantize(torch.tensor([0.1, 0.7, 6.0]), "mxfp4-e2m1")
    tensor([0.0000, 0.5000, 6.0000])

Each recipe of `amp_core.quantization` is computed as torchao 0.18 computes it, operation by operation, so that results
are equal bit for bit. Operations are elementwise or reduce blocks; none waits for the device.
"""

import math
from typing import NamedTuple

import torch

from amp_core.formats import Format
from amp_core.quantization import OPERANDS, ROW, TENSOR, Block, Recipe, find_recipe
from amp_core.schema import RunError

MIN_AMAX = 1e-12
"""torchao takes an amax in FP8 to be no smaller, so that the scale is finite."""

CHUNK = 1 << 16
"""Values that a CPU works on at a time: few enough for its second-level cache, with what is derived from them."""

_ZERO_TIMES_INFINITY = -1.5
"""What torchao's conversion to E2M1 makes of it. That happens to zeros in NVFP4 where the inverse of the tensor's scale
is infinite: in tensors without a magnitude above 8e-36, of which nothing sensible is left there."""

_HADAMARD = 16
"""Size of the Hadamard transform in NVFP4 pretraining (arXiv 2509.25149)."""

_SIGNS = (1.0, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The random signs before the transform: fixed, as in Transformer Engine, so that both operands of a product have the
same."""


def fake_quantize(
    tensor: torch.Tensor,
    recipe: str | Recipe,
    *,
    axis: int = -1,
    tensor_amax: float | torch.Tensor | None = None,
    stochastic: bool = False,
    hadamard: bool = False,
    generator: torch.Generator | None = None,
    kind: str = "activation",
) -> torch.Tensor:
    """Quantize and dequantize a tensor of any shape; returns FP32 of the same shape, without gradient.

    Args:
        tensor: floating point; read as FP32, which is exact for dtypes of 16 bits and fewer.
        recipe: a name from `amp_core.quantization.RECIPES`, or a recipe.
        axis: the dimension along which blocks and rows lie: the contraction of the matrix product. The last block may
            be shorter. Tiles of rows × columns lie in the last two dimensions.
        tensor_amax: the largest magnitude from which a scale of the whole tensor follows, instead of the tensor's own:
            of a calibration, or of earlier steps for delayed scaling. Recipes without such a scale do not use it.
        stochastic: round to one of the two neighbours at random, so that the mean is the value, instead of the nearer.
        hadamard: quantize after a random Hadamard transform of 16 along `axis`, and transform back.
        generator: draws the random numbers of `stochastic`.
        kind: `activation`, `weight` or `output_grad`. Some recipes have another element for output gradients
            (`fp8-tensorwise`) or other blocks for weights (`fp8-block`).

    Finite values beyond the largest saturate. A NaN makes its block NaN; an infinity saturates in MX and makes its
    block NaN elsewhere, or the tensor where that has a scale. A block scale of 2^-127 divides as 2^-126, as in torchao.
    A tensor of zeros stays zero. Raises `RunError` for a bad argument.
    """
    recipe = recipe if isinstance(recipe, Recipe) else find_recipe(recipe)
    _check(tensor, axis, tensor_amax, kind, generator)
    block, element = recipe.block_of(kind), recipe.element_of(kind)
    values = tensor.detach().to(torch.float32)
    if not values.numel():
        return values.clone()
    if hadamard:
        values = _transformed(values, axis)
    whole = None
    if block == TENSOR or recipe.levels == 2:
        whole = values.abs().amax() if tensor_amax is None else torch.as_tensor(tensor_amax, device=values.device)
        whole = whole.to(torch.float32).reshape(1, 1)
    blocks = _in_blocks(values, block, axis)
    held = torch.empty_like(blocks)
    rows = max(1, CHUNK // blocks.shape[1]) if blocks.is_cpu else len(blocks)
    for some, into in zip(blocks.split(rows), held.split(rows), strict=True):
        amax = whole if whole is not None and block == TENSOR else some.abs().amax(-1, keepdim=True)
        scales = block_scales(recipe, element, block, amax, whole)
        torch.mul(some, scales.encode, out=into) if scales.multiply else torch.div(some, scales.encode, out=into)
        if whole is not None and recipe.levels == 2:
            into.nan_to_num_(_ZERO_TIMES_INFINITY, math.inf, -math.inf)
        _round(into, element, stochastic, generator)
        into.div_(scales.decode) if scales.divide else into.mul_(scales.decode)
    result = _out_of_blocks(held, values.shape, block, axis)
    return _transformed_back(result, tensor.shape, axis) if hadamard else result


def scale_factors(
    tensor: torch.Tensor, recipe: Recipe, axis: int = -1, kind: str = "activation", *, hadamard: bool = False
) -> torch.Tensor:
    """By what `fake_quantize` multiplies each value before it rounds, in FP32; of the tensor's shape, but with
    `hadamard` of that of the transformed values."""
    block, element = recipe.block_of(kind), recipe.element_of(kind)
    values = tensor.detach().to(torch.float32)
    values = _transformed(values, axis) if hadamard and values.numel() else values
    if not values.numel():
        return values.clone()
    whole = values.abs().amax().reshape(1, 1) if block == TENSOR or recipe.levels == 2 else None
    blocks = _in_blocks(values, block, axis)
    amax = whole if whole is not None and block == TENSOR else blocks.abs().amax(-1, keepdim=True)
    scales = block_scales(recipe, element, block, amax, whole)
    encode = scales.encode if scales.multiply else 1.0 / scales.encode
    return _out_of_blocks(encode.expand_as(blocks).contiguous(), values.shape, block, axis)


class Scales(NamedTuple):
    """What values of a block are multiplied with, or divided by, before and after they are rounded."""

    encode: torch.Tensor
    multiply: bool
    decode: torch.Tensor
    divide: bool


def block_scales(
    recipe: Recipe, element: Format, block: Block, amax: torch.Tensor, whole: torch.Tensor | None
) -> Scales:
    """The scales of blocks whose largest magnitudes are `amax` [blocks, 1]; `whole` [1, 1] is the tensor's."""
    if recipe.scale.name == "e8m0":
        return _powers_of_two(recipe.rule, element, amax)
    if recipe.scale.name == "fp32":
        scale = (element.max_value / amax.to(torch.float64).clamp(min=MIN_AMAX)).to(torch.float32)
        divide = block in (TENSOR, ROW)  # torchao divides by these, and multiplies with the inverse of others
        if recipe.rule == "amax-pow2":  # torchao's logarithm rounds up just below a power of two, others' scales do not
            exponent = torch.floor(torch.log2(scale)) if divide else torch.frexp(scale).exponent - 1.0
            scale = torch.exp2(exponent)
        return Scales(scale, True, scale if divide else 1.0 / scale, divide)
    narrow = amax / element.max_value
    if whole is not None:
        tensor_scale = whole / (recipe.scale.max_value * element.max_value)
        tensor_scale = torch.where(tensor_scale == 0, 1.0, tensor_scale)
        narrow = narrow / tensor_scale
    narrow = _round(narrow.clamp(min=recipe.scale.min_normal), recipe.scale)
    if whole is None:
        return Scales(1.0 / narrow, True, narrow, False)
    return Scales((1.0 / tensor_scale) / narrow, True, tensor_scale * narrow, False)


def _powers_of_two(rule: str, element: Format, amax: torch.Tensor) -> Scales:
    """E8M0 scales; the stored exponent of 255 is NaN."""
    if rule == "floor":
        exponent = (amax.view(torch.int32) >> 23) - element.max_exponent
        exponent = torch.where(amax.isnan(), 255, exponent.clamp(0, 255))
        least = 2.0**-126 if element.exponent_bits else 2.0**-127  # torchao's; it has no INT8
        encode = (exponent << 23).view(torch.float32).clamp(min=least)
    else:
        scale = amax / element.max_value
        exponent = (torch.ceil(torch.log2(scale)).clamp(-127, 127) + 127).nan_to_num(255.0).to(torch.int32)
        exponent = torch.where(scale.isinf(), 254, exponent)
        # 2^-(exponent - 127), but 1 for the smallest exponent and 2^-127 for that of infinity.
        encode = torch.where(exponent == 0, 1.0, torch.exp2(127.0 - exponent))
    decode = torch.where(exponent == 0, 2.0**-127, (exponent << 23).view(torch.float32))
    decode = torch.where(exponent == 255, math.nan, decode)
    return Scales(encode, rule != "floor", decode, False)


def _round(
    values: torch.Tensor, element: Format, stochastic: bool = False, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Round FP32 values to the element's, in place and saturating; ties go to even. NaN stays NaN.

    Added to a number whose last bit is worth as much as the element's unit at that exponent, a value is rounded there
    by the addition itself.
    """
    values.clamp_(-element.max_value, element.max_value)
    bits = values.view(torch.int32)
    power = (bits & 0x7F800000).view(torch.float32).clamp_(min=2.0**element.min_normal_exponent)
    sign = bits & -0x80000000
    if stochastic:
        unit = power.mul_(2.0**-element.mantissa_bits)
        values.abs_().div_(unit)
        values.add_(torch.rand(values.shape, generator=generator, device=values.device)).floor_().mul_(unit)
        values.clamp_(max=element.max_value)
    else:
        power.mul_(1.5 * 2.0 ** (23 - element.mantissa_bits))
        values.add_(power).sub_(power)
    bits |= sign  # also that of zero
    return values


def _in_blocks(values: torch.Tensor, block: Block, axis: int) -> torch.Tensor:
    """The values as rows [blocks, values of a block], with zeros where a block is not full."""
    if block == TENSOR:
        return values.reshape(-1, 1)  # all with the same scale
    if isinstance(block, tuple):
        values = values.reshape(*(1,) * (2 - values.dim()), *values.shape)
        rows, columns = block
        high, wide = (-(-size // side) for size, side in zip(values.shape[-2:], block, strict=True))
        padded = _padded(_padded(values, wide * columns).mT, high * rows).mT
        tiles = padded.reshape(-1, high, rows, wide, columns).transpose(2, 3)
        return tiles.reshape(-1, rows * columns)
    values = values.reshape(1) if not values.dim() else values.movedim(axis, -1)
    size = values.shape[-1] if block == ROW else int(block)
    return _padded(values, -(-values.shape[-1] // size) * size).reshape(-1, size)


def _out_of_blocks(blocks: torch.Tensor, shape: torch.Size, block: Block, axis: int) -> torch.Tensor:
    """The values in their shape again."""
    if block == TENSOR or not shape:
        return blocks.reshape(-1)[: shape.numel()].reshape(shape)
    if isinstance(block, tuple):
        height, width = ((1,) * 2 + tuple(shape))[-2:]
        rows, columns = block
        high, wide = -(-height // rows), -(-width // columns)
        whole = blocks.reshape(-1, high, wide, rows, columns).transpose(2, 3)
        return whole.reshape(-1, high * rows, wide * columns)[:, :height, :width].reshape(shape)
    moved = torch.empty(shape, device="meta").movedim(axis, -1).shape
    padded = blocks.reshape(*moved[:-1], -1)
    return padded[..., : moved[-1]].movedim(-1, axis).contiguous()


def _padded(values: torch.Tensor, length: int) -> torch.Tensor:
    """With zeros up to that length of the last dimension."""
    missing = length - values.shape[-1]
    return torch.nn.functional.pad(values, (0, missing)) if missing else values


def _transformed(values: torch.Tensor, axis: int) -> torch.Tensor:
    """The random Hadamard transform of each 16 values along an axis, with zeros up to whole sixteens."""
    values = values.reshape(1) if not values.dim() else values.movedim(axis, -1)
    padded = _padded(values, -(-values.shape[-1] // _HADAMARD) * _HADAMARD).unflatten(-1, (-1, _HADAMARD))
    signs = torch.tensor(_SIGNS, device=values.device)
    return _hadamard(padded * signs).flatten(-2).movedim(-1, axis if values.dim() > 1 else -1)


def _transformed_back(values: torch.Tensor, shape: torch.Size, axis: int) -> torch.Tensor:
    moved = values.movedim(axis if values.dim() > 1 else -1, -1)
    signs = torch.tensor(_SIGNS, device=values.device)
    back = (_hadamard(moved.unflatten(-1, (-1, _HADAMARD))) * signs).flatten(-2)
    length = shape[axis] if shape else 1
    return back[..., :length].movedim(-1, axis if values.dim() > 1 else -1).reshape(shape).contiguous()


def _hadamard(values: torch.Tensor) -> torch.Tensor:
    """The orthonormal Hadamard transform of the last dimension, which is its own inverse; in FP32 on any device."""
    half = 1
    while half < _HADAMARD:
        pairs = values.unflatten(-1, (-1, 2, half))
        first, second = pairs.unbind(-2)
        values = torch.stack((first + second, first - second), -2).flatten(-3)
        half *= 2
    return values / math.sqrt(_HADAMARD)


def _check(tensor: object, axis: object, tensor_amax: object, kind: object, generator: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise RunError(f"tensor={type(tensor).__name__} is not a torch.Tensor; give the tensor to quantize")
    if not tensor.is_floating_point():
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise RunError(f"tensor has dtype {dtype}, which is not real floating point; give FP32, BF16 or FP16 values")
    if tensor.layout != torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        raise RunError(f"tensor has layout {layout}; give a dense tensor, such as tensor.to_dense()")
    dims = max(tensor.dim(), 1)
    if isinstance(axis, bool) or not isinstance(axis, int) or not -dims <= axis < dims:
        raise RunError(
            f"axis={axis!r} is out of range; a tensor of {tensor.dim()} dimensions has {-dims} to {dims - 1}"
        )
    if kind not in OPERANDS:
        raise RunError(f"kind={kind!r} is unknown; choose one of {', '.join(OPERANDS)}")
    if not isinstance(generator, torch.Generator | None):
        raise RunError(f"generator={generator!r:.80} is not a torch.Generator; give one, or None")
    if tensor_amax is None:
        return
    number = isinstance(tensor_amax, int | float) and not isinstance(tensor_amax, bool)
    if number and tensor_amax >= 0:  # type: ignore[operator]
        return
    if not (isinstance(tensor_amax, torch.Tensor) and tensor_amax.numel() == 1):
        raise RunError(
            f"tensor_amax={tensor_amax!r:.80} is not a magnitude; give a non-negative number, or a tensor with one "
            "element"
        )
