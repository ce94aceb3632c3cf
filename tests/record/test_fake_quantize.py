"""`fake_quantize` against torchao, bit for bit, and against the definition of a format, value by value."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_core import RunError
from amp_core.quantization import ELEMENTS, RECIPES, Recipe
from amp_core.record import fake_quantize

ROWS, COLUMNS = 128, 1024
TENSORS, TENSOR_ROWS = 10, 1024
"""10,485,760 values, in tensors that stay in the caches."""


def distribution(name: str, rows: int, seed: int = 0) -> torch.Tensor:
    """FP32 values [rows, COLUMNS]."""
    draw = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, COLUMNS, generator=draw)
    uniform = torch.rand(rows, COLUMNS, generator=draw)
    if name == "heavy-tailed":
        return torch.exp(4 * normal) * (uniform - 0.5).sign()
    if name == "outliers":
        return torch.where(uniform < 1e-3, 1e4 * normal, normal)
    if name == "sparse":
        return torch.where(uniform < 0.05, normal, 0.0)
    if name == "subnormal":
        return normal * 1e-39
    if name == "near the smallest scale":
        return normal * 2.0 ** torch.randint(-140, -100, (rows, 1), generator=draw)
    if name == "near the largest":
        return normal * 1e37
    if name == "all-zero blocks":
        return torch.where(torch.arange(COLUMNS) // 128 % 2 == 0, 0.0, normal)
    if name == "zeros":
        return torch.zeros(rows, COLUMNS)
    if name == "NaN":
        return torch.where(uniform < 1e-4, math.nan, normal)
    if name == "infinities":
        return torch.where(uniform < 1e-4, (normal * math.inf), normal)
    if name == "ties":
        return torch.randint(-64, 65, (rows, COLUMNS), generator=draw) / 8
    if name == "any bits":
        bits = torch.randint(-(2**31), 2**31 - 1, (rows, COLUMNS), generator=draw).to(torch.int32)
        return bits.view(torch.float32).nan_to_num(0.0)
    return normal


NAMED = ["normal", "heavy-tailed", "outliers", "sparse", "subnormal", "all-zero blocks"]
ALL = [*NAMED, "near the smallest scale", "near the largest", "NaN", "infinities", "ties", "any bits"]


def torchao_reference(recipe: Recipe, values: torch.Tensor, kind: str) -> torch.Tensor:
    """What torchao holds for these values, in FP32."""
    pytest.importorskip("torchao", reason="torchao is not installed; pip install 'ampscope[test]'")
    from torchao.float8.float8_utils import ScalingGranularity, tensor_to_scale, to_fp8_saturated
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    element = recipe.element_of(kind)
    if recipe.scale.name == "e8m0":
        others = {
            "fp6-e3m2": DTYPE_FP6_E3M2,
            "fp6-e2m3": DTYPE_FP6_E2M3,
            "fp4-e2m1": getattr(torch, "float4_e2m1fn_x2", None),
        }
        dtype = others[element.name] if element.dtype is None else getattr(torch, element.dtype)
        mode = ScaleCalculationMode.FLOOR if recipe.rule == "floor" else ScaleCalculationMode.RCEIL
        scale, held = to_mx(values, dtype, 32, mode)
        return to_dtype(held, scale, dtype, 32, torch.float32)
    if recipe.name == "nvfp4":
        held = NVFP4Tensor.to_nvfp4(values, per_tensor_scale=per_tensor_amax_to_scale(values.abs().max()))
        return held.dequantize(torch.float32)
    dtype = getattr(torch, str(element.dtype))
    if recipe.by_tensor or recipe.block == "row":
        by_row = recipe.block == "row"
        scale = tensor_to_scale(
            values,
            dtype,
            scaling_granularity=ScalingGranularity.AXISWISE if by_row else ScalingGranularity.TENSORWISE,
            axiswise_dim=-1 if by_row else None,
            round_scales_to_power_of_2=recipe.rule == "amax-pow2",
        )
        return to_fp8_saturated(values.float() * scale, dtype).float() / scale
    from torchao.prototype.blockwise_fp8_training import kernels

    if kind == "weight":
        held, inverse = kernels.torch_blockwise_scale_weight_quant(values)
        return held.float() * inverse.repeat_interleave(128, 0).repeat_interleave(128, 1)
    held, inverse = kernels.torch_blockwise_scale_act_quant_lhs(values)
    return (held.float().view(-1, 128) * inverse.reshape(-1, 1)).view(values.shape)


REFERENCED = [
    (name, "activation") for name in RECIPES if name not in ("fp8-delayed", "fp8-block-pow2", "mxint8", "nvfp4-2d")
]
REFERENCED += [("fp8-tensorwise", "output_grad"), ("fp8-tensorwise-pow2", "output_grad"), ("fp8-block", "weight")]


def differences(got: torch.Tensor, expected: torch.Tensor) -> int:
    same = (got.view(torch.int32) == expected.view(torch.int32)) | (got.isnan() & expected.isnan())
    return int((~same).sum())


def wrong_bits(given_values: torch.Tensor) -> Counter[tuple[str, str]]:
    """How many values differ from torchao's, by recipe and operand; those without a difference are left out."""
    return +Counter(
        {
            (name, kind): differences(
                fake_quantize(given_values, name, kind=kind), torchao_reference(RECIPES[name], given_values, kind)
            )
            for name, kind in REFERENCED
        }
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["FP32", "BF16"])
@pytest.mark.parametrize("values", ALL)
def test_every_bit_is_that_of_torchao(values: str, dtype: torch.dtype) -> None:
    assert wrong_bits(distribution(values, ROWS).to(dtype)) == {}


@pytest.mark.whole
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["FP32", "BF16"])
@pytest.mark.parametrize("values", NAMED)
def test_every_bit_of_ten_million_values_is_that_of_torchao(values: str, dtype: torch.dtype) -> None:
    tensors = (distribution(values, TENSOR_ROWS, seed).to(dtype) for seed in range(TENSORS))
    assert sum(map(wrong_bits, tensors), Counter()) == {}


def positive_values(recipe: Recipe) -> np.ndarray:
    """Every value of the element from zero on, by counting."""
    element = recipe.element
    unit = element.min_subnormal
    steps = [np.arange(0, 2**element.mantissa_bits) * unit]  # zero and subnormals
    power = element.min_normal
    while power <= element.max_value:
        steps.append(power * (1 + np.arange(2**element.mantissa_bits) * 2.0**-element.mantissa_bits))
        power *= 2
    values = np.concatenate(steps)
    return values[values <= element.max_value]


def nearest(values: np.ndarray, representable: np.ndarray) -> np.ndarray:
    """The representable value nearest to each, in float64; ties to the one with an even last bit."""
    magnitude = np.minimum(np.abs(values), representable[-1])
    above = np.searchsorted(representable, magnitude).clip(1, len(representable) - 1)
    low, high = representable[above - 1], representable[above]
    up = (magnitude - low > high - magnitude) | ((magnitude - low == high - magnitude) & (above % 2 == 0))
    return np.copysign(np.where(up, high, low), values)


@pytest.mark.parametrize("name", [n for n, r in RECIPES.items() if r.rule == "floor"])
@pytest.mark.parametrize("values", ["normal", "heavy-tailed", "ties", "sparse"])
def test_mx_is_what_the_specification_says(name: str, values: str) -> None:
    recipe = RECIPES[name]
    given_values = distribution(values, 8)
    exact = given_values.double().numpy().reshape(-1, 32)
    amax = np.abs(exact).max(1, keepdims=True)
    scale = np.where(amax > 0, 2.0 ** (np.floor(np.log2(np.maximum(amax, 1e-300))) - recipe.element.max_exponent), 1.0)
    expected = (nearest(exact / scale, positive_values(recipe)) * scale).reshape(given_values.shape)
    assert np.array_equal(fake_quantize(given_values, name).double().numpy(), expected)


ML_DTYPES = {
    "fp8-e4m3": "float8_e4m3fn",
    "fp8-e5m2": "float8_e5m2",
    "fp6-e3m2": "float6_e3m2fn",
    "fp6-e2m3": "float6_e2m3fn",
    "fp4-e2m1": "float4_e2m1fn",
}
"""Elements as `ml_dtypes` names them; it has no INT8 with a fraction."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["FP32", "BF16", "FP16"])
@pytest.mark.parametrize("values", [*ALL, "zeros"])
def test_elements_are_rounded_as_ml_dtypes_does(values: str, dtype: torch.dtype) -> None:
    """Along both axes, with ragged blocks. Left out: blocks with an infinity, and those whose scale is 2^-127, where
    `fake_quantize` follows torchao."""
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    given_values = distribution(values, 72)[:, :200].to(dtype)
    recipes = [r for r in RECIPES.values() if r.rule == "floor" and r.element.name in ML_DTYPES]
    for axis, recipe in itertools.product((0, 1, -1, -2), recipes):
        blocks, held = (
            np.pad(t.double().movedim(axis, -1).numpy(), [(0, 0), (0, -t.shape[axis] % 32)], mode="edge").reshape(
                -1, 32
            )
            for t in (given_values, fake_quantize(given_values, recipe, axis=axis))
        )
        amax = np.abs(blocks).max(1, keepdims=True)
        power = np.frexp(np.where(np.isfinite(amax), amax, 1.0))[1] - 1 - recipe.element.max_exponent
        scale = np.ldexp(1.0, np.clip(power, -126, 127))
        scaled = np.clip(blocks / scale, -recipe.element.max_value, recipe.element.max_value).astype(np.float32)
        expected = scaled.astype(getattr(ml_dtypes, ML_DTYPES[recipe.element.name])).astype(np.float64) * scale
        compared = (np.isfinite(amax) & ((power > -127) | (amax == 0)))[:, 0]
        assert np.array_equal(held[compared], expected[compared].astype(np.float32)), (recipe.name, axis)
        assert np.isnan(held[np.isnan(amax)[:, 0]]).all(), (recipe.name, axis)


def test_a_block_scale_just_below_a_power_of_two_is_rounded_down() -> None:
    """To 8, as Transformer Engine's reference does: 448 / amax is the number before 16."""
    values = torch.full((128,), 2.0**-13)
    values[0] = 28.0 + 2.0**-19
    assert fake_quantize(values, "fp8-block-pow2").tolist()[:2] == [28.0, 0.0]  # E4M3 has 2^-9, and 2^-10 is a tie


@pytest.mark.parametrize(
    "shape", [(), (1,), (33,), (5, 7), (3, 40, 50), (2, 3, 4, 17), (130, 257), (0,), (4, 0), (0, 3)]
)
@pytest.mark.parametrize("name", RECIPES)
def test_any_shape_comes_back_as_it_was(name: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    values = torch.randn(shape)
    for kind in ("activation", "weight", "output_grad"):
        held = fake_quantize(values, name, kind=kind)
        assert held.shape == values.shape and held.dtype is torch.float32
        assert held is not values and not held.requires_grad
        if values.numel():
            largest = values.abs().max()
            assert (held - values).abs().max() <= largest * 0.26


@pytest.mark.parametrize("axis", [0, 1, 2, -2])
@pytest.mark.parametrize("name", ["mxfp4-e2m1", "nvfp4", "fp8-rowwise", "fp8-block", "fp8-tensorwise"])
def test_blocks_lie_along_the_axis(name: str, axis: int) -> None:
    torch.manual_seed(0)
    values = torch.exp(3 * torch.randn(40, 50, 37))
    moved = values.movedim(axis, -1).contiguous()
    assert torch.equal(fake_quantize(values, name, axis=axis).movedim(axis, -1), fake_quantize(moved, name))
    assert torch.equal(fake_quantize(values.mT, name, axis=-2), fake_quantize(values, name).mT)


def test_a_ragged_last_block_has_a_scale_of_its_own() -> None:
    values = torch.cat([torch.full((32,), 1000.0), torch.tensor([0.5, 1.0, 6.0])])
    assert fake_quantize(values, "mxfp4").tolist()[32:] == [0.5, 1.0, 6.0]


def test_tiles_share_a_scale_over_rows_and_columns() -> None:
    values = torch.full((20, 40), 0.3)
    values[3, 5] = 6.0
    held = fake_quantize(values, "nvfp4-2d", kind="weight", tensor_amax=6.0)
    assert len(held[:16, :16].unique()) == 2 and held[3, 5] == 6.0
    assert held[0, 0] in (0.0, 0.5)  # in the outlier's tile
    assert abs(held[19, 39] - 0.3) < 0.02 and abs(held[0, 16] - 0.3) < 0.02


def test_the_amax_of_the_tensor_can_be_given() -> None:
    values = torch.tensor([1.0, 2.0, 100.0])
    for amax in (50.0, torch.tensor(50.0), torch.tensor([50.0], dtype=torch.float64)):
        assert fake_quantize(values, "fp8-delayed", tensor_amax=amax)[2] == 50.0  # saturates
    own = fake_quantize(values, "nvfp4")
    assert torch.equal(fake_quantize(values, "nvfp4", tensor_amax=100.0), own)
    assert torch.equal(fake_quantize(values, "mxfp8", tensor_amax=1e9), fake_quantize(values, "mxfp8"))


@pytest.mark.parametrize("name", RECIPES)
def test_zeros_stay_zeros_with_their_sign(name: str) -> None:
    held = fake_quantize(torch.tensor([0.0, -0.0, 0.0]), name)
    assert held.tolist() == [0.0, 0.0, 0.0] and held.signbit().tolist() == [False, True, False]


def test_stochastic_rounding_has_the_value_as_its_mean_and_repeats_with_a_generator() -> None:
    values = torch.cat([torch.tensor([6.0]), torch.full((200_000,), 1.1), torch.full((200_000,), -0.2)])
    draws = [
        fake_quantize(values, "fp8-tensorwise", stochastic=True, generator=torch.Generator().manual_seed(seed))
        for seed in (0, 0, 1)
    ]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert draws[0][1:200_001].mean() == pytest.approx(1.1, abs=1e-3)
    assert draws[0][200_001:].mean() == pytest.approx(-0.2, abs=1e-3)
    assert len(draws[0][1:200_001].unique()) == 2 and draws[0][0] == 6.0


@pytest.mark.parametrize("name", [n for n, r in RECIPES.items() if r.rule == "floor"])
def test_stochastic_rounding_keeps_what_the_format_has(name: str) -> None:
    torch.manual_seed(0)
    held = fake_quantize(torch.randn(64, 64), name)
    assert torch.equal(fake_quantize(held, name, stochastic=True), held)


def test_stochastic_rounding_reaches_every_recipe() -> None:
    torch.manual_seed(0)
    values = torch.randn(64, 256)
    for name in RECIPES:
        nearest_values, drawn = (fake_quantize(values, name, stochastic=on) for on in (False, True))
        assert not torch.equal(nearest_values, drawn), name
        assert (drawn - values).norm() < 2.5 * (nearest_values - values).norm(), name


@pytest.mark.parametrize("length", [16, 64, 50])
def test_the_hadamard_transform_spreads_an_outlier_and_is_undone(length: int) -> None:
    torch.manual_seed(0)
    values = torch.randn(32, length)
    exact = fake_quantize(values, "fp8-tensorwise", hadamard=True)
    assert (exact - values).norm() / values.norm() < 0.03
    outlier = torch.full((64, length), 0.01)
    outlier[:, 3] = 1.0
    plain, spread = (fake_quantize(outlier, "nvfp4", hadamard=on) for on in (False, True))
    assert (plain[:, :16] == 0).sum() > 64  # beside the outlier all is lost
    assert (spread[:, :3].mean() - 0.01).abs() < 0.05 and spread.shape == outlier.shape
    turned = fake_quantize(values.T, "nvfp4", axis=0, hadamard=True)
    assert torch.equal(turned.T, fake_quantize(values, "nvfp4", hadamard=True))


def test_both_operands_transformed_give_the_same_product() -> None:
    """The transform is orthonormal, and both operands have the same signs."""
    torch.manual_seed(0)
    one, other = torch.randn(8, 64), torch.randn(8, 64)
    product = fake_quantize(one, "mxint8", hadamard=True) @ fake_quantize(other, "mxint8", hadamard=True).T
    assert (product - one @ other.T).norm() / (one @ other.T).norm() < 0.02


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_narrow_inputs_are_quantized_as_the_fp32_values_that_they_are(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = torch.randn(8, 64).to(dtype)
    assert torch.equal(fake_quantize(values, "nvfp4"), fake_quantize(values.float(), "nvfp4"))


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=70),
    st.sampled_from(list(RECIPES)),
)
def test_the_input_stays_and_magnitudes_keep_their_order(numbers: list[float], name: str) -> None:
    values = torch.tensor(numbers)
    before = values.clone()
    held = fake_quantize(values, name)
    assert torch.equal(values, before)
    if 1e-30 < before.abs().max() < 1e37 and RECIPES[name].levels == 1 and len(numbers) <= 16:
        order = before.argsort(stable=True)
        assert (held[order].diff() >= 0).all()  # rounding is monotonous within a block


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((torch.ones(3), "fp99"), r"^recipe='fp99' is unknown; choose one of fp8-tensorwise"),
        (([1.0], "nvfp4"), r"^tensor=list is not a torch.Tensor"),
        ((torch.ones(3, dtype=torch.int64), "nvfp4"), r"^tensor has dtype int64"),
        ((torch.ones(3, dtype=torch.bool), "nvfp4"), r"^tensor has dtype bool"),
        ((torch.ones(3, dtype=torch.complex64), "nvfp4"), r"^tensor has dtype complex64"),
        ((torch.ones(3, 4).to_sparse(), "nvfp4"), r"^tensor has layout sparse_coo; give a dense tensor"),
    ],
)
def test_a_wrong_tensor_or_recipe_is_one_sentence(arguments: tuple, says: str) -> None:
    with pytest.raises(RunError, match=says):
        fake_quantize(*arguments)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"axis": 2}, r"^axis=2 is out of range; a tensor of 2 dimensions has -2 to 1$"),
        ({"axis": -3}, r"^axis=-3 is out of range"),
        ({"axis": 1.0}, r"^axis=1.0 is out of range"),
        ({"tensor_amax": -1.0}, r"^tensor_amax=-1.0 is not a magnitude"),
        ({"tensor_amax": "6"}, r"^tensor_amax='6' is not a magnitude"),
        ({"tensor_amax": torch.ones(2)}, r"^tensor_amax=tensor\(\[1., 1.\]\) is not a magnitude"),
        ({"generator": 3}, r"^generator=3 is not a torch.Generator"),
        ({"kind": "bias"}, r"^kind='bias' is unknown; choose one of weight, activation, output_grad$"),
    ],
)
def test_a_wrong_option_is_one_sentence(wrong: dict, says: str) -> None:
    with pytest.raises(RunError, match=says):
        fake_quantize(torch.ones(2, 3), "fp8-tensorwise", **wrong)


def test_a_recipe_of_ones_own_needs_one_entry() -> None:
    half = Recipe("mxfp4-16", "MXFP4/16", ELEMENTS["fp4-e2m1"], 16, ELEMENTS["e8m0"], "floor")
    torch.manual_seed(0)
    values = torch.randn(4, 64)
    assert torch.equal(fake_quantize(values, half)[:, :16], fake_quantize(values[:, :16].contiguous(), "mxfp4"))
    one_level = Recipe("fp4-e4m3", "FP4", ELEMENTS["fp4-e2m1"], 16, ELEMENTS["fp8-e4m3"], "amax")
    torchao = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor", reason="torchao is not installed")
    assert torch.equal(fake_quantize(values, one_level), torchao.NVFP4Tensor.to_nvfp4(values).dequantize(torch.float32))
