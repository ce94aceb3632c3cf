"""One's own values in 8 and 4 bits are those of `fake_quantize`, and show whom an outlier hurts."""

import math

import numpy as np
import pytest
import torch

from amp_core import RunError
from amp_core.analysis.format_lab.blocks import MAX_VALUES, block_size, parse_values, quantized_values, recipe_effects
from amp_core.quantization import RECIPES
from amp_core.record.fake_quantize import fake_quantize


def samples():
    random = np.random.default_rng(0)
    normal = random.normal(size=300).astype(np.float32)
    outlier = normal.copy()
    outlier[70] = 4000.0
    tiny = (normal * 1e-38).astype(np.float32)
    return {
        "normal": normal,
        "heavy-tailed": (normal**5).astype(np.float32),
        "outlier": outlier,
        "sparse": np.where(random.random(300) < 0.9, 0, normal).astype(np.float32),
        "subnormal": tiny,
        "zeros": np.zeros(40, dtype=np.float32),
        "powers": np.ldexp(np.float32(1), np.arange(-60, 60)).astype(np.float32),
        "one": np.array([3.3], dtype=np.float32),
    }


@pytest.mark.parametrize("kind", ["activation", "output_grad"])
@pytest.mark.parametrize("name", RECIPES)
def test_values_are_those_of_fake_quantize_bit_for_bit(name, kind):
    for what, values in samples().items():
        held = quantized_values(values, name, kind)["held"].to_numpy()
        expected = fake_quantize(torch.from_numpy(values), name, kind=kind).numpy()
        assert held.dtype == np.float32
        np.testing.assert_array_equal(held.view(np.int32), expected.view(np.int32), what)


def test_a_block_shares_one_scale_that_its_largest_value_sets():
    frame = quantized_values([1.0] * 31 + [100.0] + [1.0] * 32, "mxfp4")
    assert frame.groupby("block")["scale"].unique().map(list).tolist() == [[16.0], [0.25]]  # 2^(6 - 2), 2^(0 - 2)
    assert frame["element"].iloc[31] == 6.0 and frame["what"].iloc[31] == "saturated"  # 100 / 16 is beyond 6
    assert frame["what"].iloc[0] == "underflow" and frame["held"].iloc[40] == 1.0
    assert frame["smallest"].iloc[0] == 8.0


def test_an_outlier_hurts_its_block_and_with_one_scale_the_whole_tensor():
    values = [0.01] * 64
    values[5] = 10_000.0
    effects = recipe_effects(values, 5).set_index("recipe")
    mx, whole = effects.loc["mxfp8-e4m3"], effects.loc["fp8-tensorwise"]
    assert (mx["size"], mx["underflow"], mx["other_underflow"], mx["other_nonzero"]) == (32, 31, 0, 32)
    assert (whole["size"], whole["underflow"], whole["other_nonzero"]) == (64, 63, 0)
    assert mx["rel_error"] < 0.1 and mx["beside_rel_error"] == 1.0  # all but the outlier become 0
    assert math.isnan(whole["other_rel_error"]) and mx["other_rel_error"] < 0.04
    assert effects["size"].loc[["nvfp4", "fp8-rowwise", "fp8-block"]].tolist() == [16, 64, 64]
    assert list(effects.index) == list(RECIPES)
    assert block_size("nvfp4", 100) == 16 and block_size("fp8-delayed", 100) == 100


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.5, -1e-3;2", [0.5, float(np.float32(-1e-3)), 2.0]),
        ("tensor([[0.5000, 1.0000],\n        [2.0000, 3.0000]])", [0.5, 1, 2, 3]),
        ("array([1., 2.])", [1, 2]),
        ("7", [7]),
    ],
)
def test_values_are_read_as_they_are_printed(text, expected):
    assert parse_values(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", f"values has 0 numbers; give 1 to {MAX_VALUES}, separated by commas"),
        ("1 " * (MAX_VALUES + 1), f"values has {MAX_VALUES + 1} numbers"),
        ("1, two", "values='two' is no finite FP32 number; give numbers such as 0.5 or -1e-3"),
        ("1, 1e39", "values='1e39' is no finite FP32 number"),
        ("nan", "values='nan' is no finite FP32 number"),
    ],
)
def test_what_is_no_number_is_refused(text, message):
    with pytest.raises(RunError) as refused:
        parse_values(text)
    assert str(refused.value).startswith(message)
