"""The casts of torchao's training layers: `Float8Linear`, FSDP's float8 all-gather, `MXFP8Linear` and
`Float8BlockwiseLinear`.

torchao is never imported here: what the program has not imported, it does not use.
"""

import sys
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch

from amp_core.formats import FORMAT_OF_DTYPE
from amp_core.quantization import RECIPES, ROW, TENSOR, block_name
from amp_core.record.casts.cast import Cast, Key, Library, Pass, Source

_KINDS = {"input": "activation", "weight": "weight", "grad_output": "output_grad"}
"""Our kinds for torchao's `GemmInputRole`."""

_MX_CASTS: dict[str, tuple[Key, ...]] = {
    "forward": (("activation", "forward"), ("weight", "forward")),
    "backward": (
        ("output_grad", "input_grad"),
        ("weight", "input_grad"),
        ("output_grad", "weight_grad"),
        ("activation", "weight_grad"),
    ),
}
"""The casts of `mx_mm`, in their order."""

_BLOCKWISE_CASTS: dict[str, dict[str, Key]] = {
    "triton_fp8_blockwise_act_quant_lhs": {
        "forward": ("activation", "forward"),
        "backward": ("output_grad", "input_grad"),
    },
    "triton_fp8_blockwise_weight_quant_transposed_rhs": {"forward": ("weight", "forward")},
    "triton_fp8_blockwise_weight_quant_rhs": {"backward": ("weight", "input_grad")},
    "triton_fp8_blockwise_act_quant_transposed_lhs": {"backward": ("output_grad", "weight_grad")},
    "triton_fp8_blockwise_act_quant_rhs": {"backward": ("activation", "weight_grad")},
}
"""The casts of `fp8_blockwise_mm`, by function and pass."""


def libraries() -> Iterator[Library]:
    """The parts of torchao that the program has imported."""
    float8 = sys.modules.get("torchao.float8.float8_linear")
    if float8 is not None:
        cast = Source(float8, "hp_tensor_to_float8_dynamic", _float8_key, _float8_cast)
        yield Library((float8.matmul_with_hp_or_float8_args,), (cast,))
    fsdp = sys.modules.get("torchao.float8.fsdp_utils")
    if fsdp is not None:
        dynamic = Source(fsdp, "hp_tensor_to_float8_dynamic", _gathered_key, _float8_cast)
        scaled = Source(fsdp, "hp_tensor_and_scale_to_float8", _gathered_key, _precomputed_cast)
        yield Library((), (dynamic, scaled))
    mx = sys.modules.get("torchao.prototype.moe_training.mxfp8_linear")
    if mx is not None:
        rows = Source(mx.MXTensor, "to_mx", _mx_key, _mx_cast)
        columns = Source(mx, "_to_mxfp8_dim1_kernel_wrapper", _mx_key, _mx_cast_of_columns)
        yield Library((mx.mx_mm,), (rows, columns))
    blockwise = sys.modules.get("torchao.prototype.blockwise_fp8_training.linear")
    if blockwise is not None:
        casts = tuple(
            Source(blockwise, name, partial(_blockwise_key, name), partial(_blockwise_cast, "transposed" in name))
            for name in _BLOCKWISE_CASTS
        )
        yield Library((blockwise.fp8_blockwise_mm,), casts)


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str, default: Any = None) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def _granularity(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    given = _argument(args, kwargs, 6, "scaling_granularity")
    return ROW if getattr(given, "value", given) == "axiswise" else TENSOR


def _float8_key(made_in: Pass | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key | None:
    role = _argument(args, kwargs, 4, "gemm_input_role")
    kind = _KINDS.get(getattr(role, "value", "input"))
    if made_in is None or kind is None:
        return None
    if _granularity(args, kwargs) == TENSOR:
        return kind, None
    if made_in.inside == "forward":
        return kind, "forward"
    if kind != "output_grad":
        return kind, "input_grad" if kind == "weight" else "weight_grad"
    return kind, "input_grad" if _argument(args, kwargs, 7, "axiswise_dim") == -1 else "weight_grad"


def _gathered_key(made_in: Pass | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key:
    """FSDP gathers a weight in FP8 once for all products, outside of them."""
    return "weight", None


def _float8_cast(key: Key, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Cast:
    granularity = _granularity(args, kwargs)
    pow2 = bool(_argument(args, kwargs, 8, "round_scales_to_power_of_2", False))
    return _cast(key, args[0], result, granularity, pow2, made_in_product=len(args) > 2 and "reduce_amax" not in kwargs)


def _precomputed_cast(key: Key, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Cast:
    # `precompute_float8_dynamic_scale_for_fsdp` is called by the loop, whenever it likes.
    return _cast(key, args[0], result, TENSOR, False, made_in_product=False)._replace(scale_age=None)


def _cast(key: Key, values: Any, result: Any, granularity: str, pow2: bool, *, made_in_product: bool) -> Cast:
    values, result = _local(values), _local(result)
    element = FORMAT_OF_DTYPE[str(result._data.dtype).removeprefix("torch.")]
    data = _widened(result._data)
    held = data / result._scale
    kind, product = key
    if kind == "weight" and made_in_product:  # the product has it transposed
        values, held, data = values.t(), held.t(), data.t()
    name = ("fp8-tensorwise" if granularity == TENSOR else "fp8-rowwise") + ("-pow2" if pow2 else "")
    recipe = name if RECIPES[name].element_of(kind) == element else None
    return Cast(kind, product, recipe, "torchao", element, granularity, values, held, data, result._scale)


def _mx_key(made_in: Pass | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key | None:
    if made_in is None:
        return None
    order = _MX_CASTS[made_in.inside]
    return order[made_in.casts] if made_in.casts < len(order) else None


def _mx_cast(key: Key, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Cast:
    element = FORMAT_OF_DTYPE[str(result.elem_dtype).removeprefix("torch.")]
    values, held, data = args[0], result.dequantize(torch.float32), _widened(result.qdata)
    exponent = result.scale.view(torch.uint8).to(torch.float32)
    mode = next((a for a in (*args, *kwargs.values()) if type(a).__name__ == "ScaleCalculationMode"), None)
    rule = str(getattr(mode, "value", "floor"))
    name = f"mx{element.name}" + {"floor": "", "rceil": "-rceil"}.get(rule, f"-{rule}")
    recipe = name if name in RECIPES else None
    return Cast(*key, recipe, "torchao", element, str(result.block_size), values, held, data, 2.0 ** (127 - exponent))


def _mx_cast_of_columns(key: Key, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Cast:
    """The function takes a tensor and gives its transpose, quantized along what were its columns."""
    return _mx_cast(key, (args[0].t().contiguous(), *args[1:]), kwargs, result)


def _blockwise_key(name: str, made_in: Pass | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key | None:
    return _BLOCKWISE_CASTS[name].get(made_in.inside) if made_in is not None else None


def _blockwise_cast(
    transposed: bool, key: Key, args: tuple[Any, ...], kwargs: dict[str, Any], result: tuple[torch.Tensor, torch.Tensor]
) -> Cast:
    """The functions give FP8 values and the reciprocals of their scales, one for each block."""
    data, reciprocals = (t.t() if transposed else t for t in result)
    rows, columns = (size // blocks for size, blocks in zip(data.shape, reciprocals.shape, strict=True))
    element = FORMAT_OF_DTYPE[str(data.dtype).removeprefix("torch.")]
    wide = _widened(data)
    held = wide * reciprocals.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    block = block_name((rows, columns) if key[0] == "weight" else max(rows, columns))
    return Cast(*key, "fp8-block", "torchao", element, block, args[0], held, wide, 1.0 / reciprocals)


def _widened(data: torch.Tensor) -> torch.Tensor:
    """`data`, in 8 bits, in FP32. By a table on a CPU, where torch's conversion takes five times as long."""
    if data.device.type != "cpu":
        return data.to(torch.float32)
    places = data.contiguous().view(torch.uint8).to(torch.int32)
    return _values_of(data.dtype).index_select(0, places.flatten()).reshape(data.shape)


@cache
def _values_of(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).to(torch.float32)


def _local(tensor: Any) -> Any:
    """The rank's own part of a DTensor, and the weight inside of FSDP's float8 wrapper."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    return getattr(tensor, "_tensor", tensor)
