"""The elements and recipes of quantized training: facts of the formats, and what a recipe may be."""

import dataclasses
import math

import pytest

from amp_core import RunError
from amp_core.quantization import ELEMENTS, RECIPES, block_name, find_recipe

E8M0, E4M3, FP32 = (ELEMENTS[name] for name in ("e8m0", "fp8-e4m3", "fp32"))

# Largest value, smallest normal, smallest nonzero value: tables 1 to 6 of OCP MX 1.0.
OCP = {
    "fp8-e4m3": (448.0, 2.0**-6, 2.0**-9),
    "fp8-e5m2": (57344.0, 2.0**-14, 2.0**-16),
    "fp6-e3m2": (28.0, 0.25, 0.0625),
    "fp6-e2m3": (7.5, 1.0, 0.125),
    "fp4-e2m1": (6.0, 1.0, 0.5),
}


@pytest.mark.parametrize("name", OCP)
def test_an_element_has_the_limits_of_the_specification(name):
    element = ELEMENTS[name]
    assert (element.max_value, element.min_normal, element.min_subnormal) == OCP[name]
    assert element.bits == int(name[2])


def test_int8_is_spaced_evenly_and_e8m0_is_a_power_of_two_without_subnormals():
    int8 = ELEMENTS["int8"]
    assert int8.max_value == 127 * int8.min_subnormal and int8.min_subnormal == 2.0**-6
    assert int8.min_normal > int8.max_value and int8.max_exponent == 0 and int8.bits == 8
    assert E8M0.min_subnormal == E8M0.min_normal == 2.0**-127 and E8M0.max_value == 2.0**127


def test_the_largest_exponents_are_those_that_the_mx_scale_subtracts():
    expected = {"mxfp8-e4m3": 8, "mxfp8-e5m2": 15, "mxfp6-e3m2": 4, "mxfp6-e2m3": 2, "mxfp4-e2m1": 2, "mxint8": 0}
    assert {name: RECIPES[name].element.max_exponent for name in expected} == expected
    assert all((RECIPES[name].block, RECIPES[name].scale) == (32, E8M0) for name in expected)


def test_gradients_and_weights_may_have_an_element_and_blocks_of_their_own():
    assert RECIPES["fp8-tensorwise"].element_of("output_grad").name == "fp8-e5m2"
    assert RECIPES["fp8-tensorwise"].element_of("weight").name == "fp8-e4m3"
    assert RECIPES["fp8-block"].block_of("weight") == (128, 128) and RECIPES["fp8-block"].block_of("activation") == 128
    assert block_name((128, 128)) == "128x128" and block_name(32) == "32"


def test_a_recipe_says_its_scaling_in_words():
    assert RECIPES["fp8-tensorwise"].scaling == "FP32 per tensor: 448 / amax (57344 for output gradients)"
    assert RECIPES["mxfp4-e2m1"].scaling == "E8M0 per 32 values: 2^(floor(log2 amax) − 2)"
    assert RECIPES["nvfp4"].scaling == "FP8 E4M3 per 16 values: 6 / amax, over an FP32 scale of the tensor"
    assert "128 values (weights 128x128)" in RECIPES["fp8-block"].scaling
    assert "amax of 1024 steps" in RECIPES["fp8-delayed"].scaling


def test_recipes_are_found_by_name_and_alias():
    assert find_recipe("mxfp8") is RECIPES["mxfp8-e4m3"] and find_recipe("nvfp4") is RECIPES["nvfp4"]
    for wrong in ("fp3", "fp16", None, 5):
        with pytest.raises(RunError, match=rf"^recipe={wrong!r} is unknown; choose one of fp8-tensorwise, .*nvfp4"):
            find_recipe(wrong)
    spellings = [s for r in RECIPES.values() for s in (r.name, *r.aliases)]
    assert len(set(spellings)) == len(spellings)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rule": "ceil"}, "rule='ceil' is unknown"),
        ({"rule": "amax"}, "gives no E8M0 scale"),
        ({"scale": FP32}, "gives no FP32 scale"),
        ({"rule": "amax-pow2", "scale": E4M3}, "gives no FP8 E4M3 scale"),
        ({"levels": 2}, "levels=2"),
        ({"levels": 0}, "levels=0"),
        ({"block": 0}, "block=0"),
        ({"block": "column"}, "block='column'"),
        ({"weight_block": (16, 0)}, r"block=\(16, 0\)"),
    ],
)
def test_a_recipe_that_contradicts_itself_is_refused(change, says):
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(RECIPES["mxfp4-e2m1"], **change)


def test_limits_of_formats_with_a_mantissa_and_an_exponent_are_as_before():
    assert math.log2(ELEMENTS["fp8-e5m2"].min_subnormal) == -16 and FP32.min_normal == 2.0**-126
