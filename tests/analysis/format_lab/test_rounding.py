"""Rounding to a format: compared with torch for every value of the small formats and for random ones, and with closed
forms."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from amp_core.analysis.format_lab.rounding import (
    accumulated,
    bits,
    element_formats,
    format_ranges,
    neighbours,
    parse_number,
    rounded,
    rounded_operation,
    scaling,
    stored_values,
    value_class,
)
from amp_core.formats import FORMATS, Format
from amp_core.schema import RunError

SMALL = ["fp16", "bf16", "fp8-e4m3", "fp8-e5m2"]
WHOLE = {1: torch.uint8, 2: torch.uint16}
FP16 = FORMATS["fp16"]


def dtype(form: Format) -> torch.dtype:
    assert form.dtype is not None
    return getattr(torch, form.dtype)


def every_code(form: Format, stride: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Codes of a format, and the values that torch reads from them."""
    width = torch.empty(0, dtype=dtype(form)).element_size()
    codes = np.arange(0, 2 ** (8 * width), stride)
    values = torch.from_numpy(codes.astype({1: np.uint8, 2: np.uint16}[width])).view(dtype(form))
    return codes, values.double().numpy()


def comparable(numbers, form):
    """Which numbers torch rounds as the format specifies: older versions return NaN where E4M3 should saturate."""
    saturates = torch.tensor(1e6).to(dtype(form)).isnan().logical_not().item()
    return np.full(len(numbers), True) if saturates else np.abs(numbers) < form.overflow_threshold


@pytest.mark.parametrize("name", SMALL)
def test_every_value_of_a_format_is_unchanged_and_has_torchs_bits(name: str) -> None:
    form = FORMATS[name]
    for code, value in zip(*every_code(form, 1 if "fp8" in name else 13), strict=True):
        if math.isnan(value):
            assert math.isnan(rounded(value, form))
            continue
        assert rounded(value, form) == value
        assert int("".join(bits(float(value), form)), 2) == code


@pytest.mark.parametrize("name", SMALL)
def test_numbers_between_two_neighbours_round_as_in_torch(name: str) -> None:
    """Half-way points, which round to even, and numbers slightly beside them, including overflow."""
    form = FORMATS[name]
    values = np.unique(every_code(form, 1 if "fp8" in name else 17)[1])
    values = values[np.isfinite(values)].astype(np.float32)
    above = np.array([neighbours(float(v), form)[1] for v in values])
    above[~np.isfinite(above)] = 2 * form.overflow_threshold - form.max_value
    middle = ((values.astype(np.float64) + above) / 2).astype(np.float32)
    with np.errstate(over="ignore"):
        sides = [np.nextafter(middle, np.float32(s)) for s in (-np.inf, np.inf)]
    numbers = np.concatenate([middle, *sides])
    numbers = numbers[np.isfinite(numbers)]
    numbers = numbers[comparable(numbers, form)]
    expected = torch.from_numpy(numbers).to(dtype(form)).double().numpy()
    assert [rounded(float(x), form) for x in numbers] == expected.tolist()


@pytest.mark.parametrize("name", SMALL)
def test_random_numbers_round_as_in_torch(name: str) -> None:
    form = FORMATS[name]
    random = np.random.default_rng(0)
    codes = random.integers(0, 2**32, 3000, dtype=np.uint64).astype(np.uint32)  # all of FP32, evenly over its codes
    near = random.standard_normal(1500) * np.exp2(random.uniform(form.min_subnormal_exponent - 3, 17, 1500))
    numbers = np.concatenate([codes.view(np.float32), near.astype(np.float32)])
    numbers = numbers[np.isfinite(numbers) & comparable(numbers, form)]
    expected = torch.from_numpy(numbers).to(dtype(form)).double().numpy()
    result = np.array([rounded(float(x), form) for x in numbers])
    np.testing.assert_array_equal(result, expected)
    assert (np.signbit(result) == np.signbit(expected)).all()


def test_fp64_numbers_round_to_fp32_as_in_numpy() -> None:
    random = np.random.default_rng(1)
    numbers = random.standard_normal(1000) * np.exp2(random.uniform(-155, 130, 1000))
    with np.errstate(over="ignore", under="ignore"):
        expected = numbers.astype(np.float32).astype(np.float64)
    np.testing.assert_array_equal([rounded(x, FORMATS["fp32"]) for x in numbers], expected)
    assert rounded(Fraction(1, 10), FORMATS["fp64"]) == 0.1


def test_neighbours_are_the_next_codes() -> None:
    values = np.unique(every_code(FP16)[1][::29])
    as_half = values[np.isfinite(values)].astype(np.float16)
    for value, above in zip(as_half, np.nextafter(as_half, np.float16(np.inf)), strict=True):
        assert neighbours(float(value), FP16)[1] == above
    assert neighbours(65504.0, FP16) == (65472.0, math.inf)
    assert neighbours(0.0, FP16) == (-(2.0**-24), 2.0**-24)
    below, above = neighbours(448.0, FORMATS["fp8-e4m3"])
    assert below == 416.0 and math.isnan(above)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.1", Fraction(1, 10)),
        ("2^-24", Fraction(1, 2**24)),
        ("2**-24", Fraction(1, 2**24)),
        ("-2^-3", Fraction(-1, 8)),
        (" 1e-8 ", Fraction(1, 10**8)),
        ("−1.5 × 2^3", Fraction(-12)),
        ("1/3", Fraction(1, 3)),
        ("1 + 2^-11", 1 + Fraction(1, 2048)),
        ("65,504", Fraction(65504)),
        (".5", Fraction(1, 2)),
        ("-inf", -math.inf),
        ("∞", math.inf),
    ],
)
def test_numbers_are_read_as_people_write_them(text: str, value: Fraction | float) -> None:
    assert parse_number(text) == value


@pytest.mark.parametrize(
    "text",
    ["", "abc", "1 2", "2^", "^2", "1e", "1e999999999", "2^99999999", "1/0", "2^0.5", "9" * 61, "inf^2", "0^-1", "1+"],
)
def test_other_text_is_refused_at_once_in_one_sentence(text: str) -> None:
    with pytest.raises(RunError, match="number="):
        parse_number(text)


def test_classes_of_numbers() -> None:
    def kind(text: str, name: str) -> str:
        number = parse_number(text)
        return value_class(number, rounded(number, FORMATS[name]), FORMATS[name])

    assert [kind("2^-25", "fp16"), kind("2^-24", "fp16"), kind("2^-14", "fp16")] == ["underflow", "subnormal", "normal"]
    assert [kind("65519", "fp16"), kind("65520", "fp16"), kind("inf", "fp16")] == ["normal", "overflow", "inf"]
    assert [kind("464", "fp8-e4m3"), kind("465", "fp8-e4m3")] == ["normal", "overflow"]
    assert [kind("0", "fp32"), kind("nan", "bf16")] == ["zero", "nan"]


def test_one_number_in_every_format() -> None:
    table = stored_values(parse_number("0.1")).set_index("format")
    assert list(table.index) == [f.name for f in element_formats()]
    assert table.loc["fp16", "value"] == float(np.float16(0.1)) and table.loc["fp32", "value"] == float(np.float32(0.1))
    assert table.loc["fp16", ["sign", "exponent", "mantissa"]].tolist() == ["0", "01011", "1001100110"]
    assert table.loc["fp16", "abs_error"] == pytest.approx(0.1 - 0.0999755859375)
    assert table.loc["bf16", "rel_error"] == pytest.approx(0.0009765625)
    assert (table["rel_error"] <= [2.0 ** -(f.mantissa_bits + 1) for f in element_formats()]).all()
    assert (table["below"] < 0.1).all() and (table["above"] > 0.1).all()


def test_a_loss_scale_lifts_a_gradient_out_of_underflow() -> None:
    trip = scaling(parse_number("1e-8"), 16, FP16)
    assert trip.plain == 0.0 and trip.plain_kind == "underflow" and trip.plain_rel_error == 1.0
    assert trip.stored == float(np.float16(1e-8 * 65536)) and trip.stored_kind == "normal"
    assert trip.unscaled == trip.stored / 65536 and trip.rel_error < 2**-11
    assert scaling(parse_number("1"), 16, FP16).stored_kind == "overflow"
    assert math.isinf(scaling(parse_number("1"), 16, FP16).unscaled)


@pytest.mark.parametrize(
    ("a", "b", "name", "stored"),
    [
        ("1", "2^-11", "fp16", 1.0),
        ("2048", "1", "fp16", 2048.0),
        ("256", "1", "bf16", 256.0),
        ("16", "1", "fp8-e4m3", 16),
    ],
)
def test_small_addends_round_away(a: str, b: str, name: str, stored: float) -> None:
    operation = rounded_operation(parse_number(a), parse_number(b), "+", FORMATS[name])
    assert operation.stored == stored and operation.without_effect and operation.changed
    half = rounded_operation(parse_number(a) / 2, parse_number(b), "+", FORMATS[name])
    assert not half.without_effect


def test_products_leave_the_range() -> None:
    assert rounded_operation(parse_number("2^-13"), parse_number("2^-13"), "×", FP16).kind == "underflow"
    assert rounded_operation(parse_number("256"), parse_number("256"), "×", FP16).kind == "overflow"
    assert math.isnan(rounded_operation(math.inf, 0.0, "×", FP16).stored)
    with pytest.raises(RunError, match="operation='-'"):
        rounded_operation(1.0, 1.0, "-", FP16)


def test_a_sum_stops_growing_once_the_addend_is_half_a_spacing() -> None:
    frame = accumulated(Fraction(0), Fraction(1), 3000, FP16)
    assert frame["stored"].max() == 2048 and frame["exact"].iloc[-1] == 3000
    assert frame["stored"].tolist() == np.minimum(np.arange(3001), 2048).tolist()
    half = np.float16(0)
    for _ in range(500):
        half = half + np.float16(0.1)
    assert accumulated(Fraction(0), Fraction(1, 10), 500, FP16)["stored"].iloc[-1] == half
    assert len(accumulated(math.inf, Fraction(1), 3, FP16)) == 4
    with pytest.raises(RunError, match="count=0"):
        accumulated(Fraction(0), Fraction(1), 0, FP16)


def test_ranges_of_formats() -> None:
    ranges = format_ranges().set_index("format")
    assert ranges.loc["fp16", "powers"] == 40 and ranges.loc["fp32", "powers"] == 277
    assert ranges.loc["bf16", ["normal_low", "top"]].tolist() == pytest.approx([-126, 128], abs=0.01)


FAR = ["1e999", "-1e999", "2^1024", "1e308*10", "1e4000", "1e-330", "-1e-400", "1e-4000", "1e999*inf", "1e999-inf"]


@pytest.mark.parametrize("text", FAR)
def test_numbers_beyond_the_range_of_a_float_are_held_as_each_format_says(text: str) -> None:
    number = parse_number(text)
    table = stored_values(number)
    huge, sign = number != 0 and not -1 < number < 1, 1 if number > 0 else -1
    for row in table.itertuples():
        form = FORMATS[row.format]
        largest = math.inf if form.has_inf else form.max_value
        assert row.value == (sign * largest if huge else 0) and math.copysign(1, row.value) == sign
        assert row.kind in (("overflow", "inf") if huge else ("underflow",))
        assert row.exact == (math.isinf(number) and form.has_inf if isinstance(number, float) else False)
    for form in element_formats():
        assert rounded_operation(number, number, "+", form).stored == table.set_index("format").loc[form.name, "value"]
        assert len(accumulated(number, number, 3, form)) == 4
    assert scaling(number, 16, FP16).stored == sign * (math.inf if huge else 0)


def test_an_error_below_the_range_of_a_float_is_not_shown_as_equality() -> None:
    table = stored_values(parse_number("1e-400"))
    assert not table["exact"].any() and (table["rel_error"] == 1).all()
    assert not stored_values(parse_number("1 + 2^-1100"))["exact"].any()
    assert stored_values(parse_number("2^-1074")).set_index("format")["exact"].to_dict()["fp64"]


@pytest.mark.parametrize("text", ["999999^5000", "1e5000*1e5000", "1e-5000+1e5000"])
def test_numbers_of_too_many_digits_are_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(RunError, match="too many digits; give one of fewer than 5000"):
        parse_number(text)
