"""Facts about number formats, compared with torch: its finfo, every value of the narrow formats, and casts at the
limits."""

import math

import numpy as np
import pytest
import torch

from amp_core.formats import FORMAT_OF_DTYPE, FORMATS, INTEGERS, Format, dtype_of, element_bytes, format_of

STORED = [f for f in FORMATS.values() if f.dtype is not None]
NARROW = [f for f in STORED if f.narrow]


def dtype(fmt: Format) -> torch.dtype:
    assert fmt.dtype is not None
    result = getattr(torch, fmt.dtype)
    assert isinstance(result, torch.dtype)
    return result


def every_value(fmt: Format) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """All bit patterns of a narrow format as float64."""
    bits = 1 + fmt.exponent_bits + fmt.mantissa_bits
    pattern = torch.arange(2**bits, dtype=torch.int32).to(torch.uint8 if bits == 8 else torch.int16)
    values: np.ndarray[tuple[int], np.dtype[np.float64]] = pattern.view(dtype(fmt)).double().numpy()
    return values


def cast(fmt: Format, value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).to(dtype(fmt)).double())


@pytest.mark.parametrize("fmt", STORED, ids=lambda f: f.name)
def test_finfo_agrees(fmt: Format) -> None:
    info = torch.finfo(dtype(fmt))
    assert (fmt.max_value, fmt.min_normal, fmt.epsilon) == (info.max, info.smallest_normal, info.eps)
    assert 1 + fmt.exponent_bits + fmt.mantissa_bits == info.bits


@pytest.mark.parametrize("fmt", NARROW, ids=lambda f: f.name)
def test_every_value_of_the_format_is_classified_correctly(fmt: Format) -> None:
    values = every_value(fmt)
    positive = np.sort(values[np.isfinite(values) & (values > 0)])
    assert positive[0] == fmt.min_subnormal and positive[-1] == fmt.max_value
    exponents = np.frexp(positive)[1] - 1
    assert exponents.min() == fmt.min_subnormal_exponent and exponents.max() == fmt.max_exponent
    assert len(np.unique(exponents)) == fmt.powers_of_two
    subnormal = positive[positive < fmt.min_normal]
    assert len(subnormal) == 2**fmt.mantissa_bits - 1  # evenly spaced below the smallest normal
    assert np.array_equal(subnormal, fmt.min_subnormal * np.arange(1, 2**fmt.mantissa_bits))
    assert fmt.min_normal in positive and math.log2(fmt.min_normal) == fmt.min_normal_exponent
    per_power = np.unique(exponents[positive >= fmt.min_normal], return_counts=True)[1]
    whole = per_power[:-1] if fmt.name == "fp8-e4m3" else per_power  # its largest mantissa encodes NaN
    assert (whole == 2**fmt.mantissa_bits).all()
    assert bool(np.isinf(values).any()) is fmt.has_inf


@pytest.mark.parametrize("fmt", NARROW, ids=lambda f: f.name)
def test_flush_threshold_is_the_largest_magnitude_that_becomes_zero(fmt: Format) -> None:
    limit = fmt.flush_threshold
    assert cast(fmt, limit) == 0.0
    assert cast(fmt, math.nextafter(limit, 0)) == 0.0
    above = float(np.nextafter(np.float32(limit), np.float32(1)))  # torch casts through float32
    assert cast(fmt, above) == fmt.min_subnormal


@pytest.mark.parametrize("fmt", NARROW, ids=lambda f: f.name)
def test_overflow_threshold_is_the_smallest_magnitude_that_overflows(fmt: Format) -> None:
    limit = fmt.overflow_threshold
    below, above = (float(np.nextafter(np.float32(limit), np.float32(to))) for to in (0, math.inf))
    assert cast(fmt, below) == fmt.max_value
    if fmt.has_inf:
        assert cast(fmt, limit) == math.inf and cast(fmt, -limit) == -math.inf  # the tie rounds to even: overflow
    else:
        assert limit == (448 + 480) / 2 and cast(fmt, limit) == fmt.max_value
        assert math.isnan(cast(fmt, above)) or cast(fmt, above) == fmt.max_value  # older torch, newer torch


def test_formats_that_torch_does_not_store() -> None:
    tf32, fp32, fp16 = FORMATS["tf32"], FORMATS["fp32"], FORMATS["fp16"]
    assert tf32.dtype is None
    assert (tf32.exponent_bits, tf32.mantissa_bits) == (fp32.exponent_bits, fp16.mantissa_bits)
    assert (tf32.min_normal, tf32.epsilon) == (fp32.min_normal, fp16.epsilon)
    assert tf32.max_value == (2 - 2**-10) * 2.0**127


def test_formats_are_looked_up_by_dtype_widest_first() -> None:
    assert FORMAT_OF_DTYPE["bfloat16"].name == "bf16" and set(FORMAT_OF_DTYPE) == {f.dtype for f in STORED}
    assert list(FORMATS) == [f.name for f in FORMATS.values()]
    widths = [f.exponent_bits + f.mantissa_bits for f in FORMATS.values()]
    assert widths == sorted(widths, reverse=True)


def test_no_name_refers_to_two_dtypes() -> None:
    names = [name for f in FORMATS.values() for name in {f.name, f.dtype, *f.spellings} - {None}]
    names += [name for i in INTEGERS.values() for name in (i.dtype, *i.spellings)]
    assert len(names) == len(set(names)) and all(name == name.lower() for name in names if name)


@pytest.mark.parametrize("fmt", STORED, ids=lambda f: f.name)
def test_a_dtype_is_known_by_torchs_name(fmt: Format) -> None:
    torchs = dtype(fmt)
    assert format_of(str(torchs)) is fmt and format_of(fmt.dtype) is fmt and dtype_of(str(torchs)) == fmt.dtype
    assert element_bytes(str(torchs)) == torchs.itemsize
    assert fmt.autocast == (fmt.narrow and torchs.itemsize == 2)


@pytest.mark.parametrize("name", list(INTEGERS))
def test_integers_have_the_size_that_torch_gives_them(name: str) -> None:
    assert element_bytes(name) == getattr(torch, name).itemsize and dtype_of(f"torch.{name}") == name
    assert format_of(name) is None


def test_other_names_give_no_dtype() -> None:
    assert (format_of(None), format_of("Scalar"), dtype_of("TensorList"), element_bytes("")) == (None,) * 4
