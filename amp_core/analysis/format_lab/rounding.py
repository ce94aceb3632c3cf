"""Exact rounding of any number to a format, with the bits, neighbours and error of the result.

    >>> rounded(parse_number("0.1"), FORMATS["fp16"])
    0.0999755859375
    >>> bits(0.0999755859375, FORMATS["fp16"])
    ('0', '01011', '1001100110')
    >>> rounded_operation(parse_number("2048"), parse_number("1"), "+", FORMATS["fp16"]).stored
    2048.0

Numbers are fractions, so the only rounding is that to the format: to nearest, ties to even, with
subnormals. Overflow gives infinity; e4m3, which has no infinity, saturates, as in torch.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pandas as pd

from amp_core.formats import FORMATS, Format
from amp_core.schema import RunError
from amp_core.text.exact_numbers import Number, computed, is_finite, parse_number

__all__ = [
    "MAX_ADDENDS",
    "Number",
    "Operation",
    "Scaling",
    "accumulated",
    "bits",
    "element_formats",
    "format_ranges",
    "neighbours",
    "parse_number",
    "rounded",
    "rounded_operation",
    "scaling",
    "stored_values",
    "value_class",
]

MAX_ADDENDS = 5000


@dataclass(frozen=True)
class Operation:
    """a + b or a × b in a format: the rounded operands, their exact result, and the result as stored."""

    a: float
    b: float
    exact: Number
    stored: float
    kind: str
    """Class of the result; see `value_class`."""
    changed: bool
    """Whether `stored` differs from `exact`."""
    without_effect: bool
    """Whether the result is `a` although `b` is not 0: an addend, or an update, that rounds away."""


@dataclass(frozen=True)
class Scaling:
    """One gradient with and without a loss scale."""

    plain: float
    """Rounded to the format without a loss scale."""
    plain_kind: str
    scaled: Number
    """Multiplied by the loss scale, exactly."""
    stored: float
    """`scaled`, rounded to the format."""
    stored_kind: str
    unscaled: float
    """Divided by the loss scale again, in FP32."""
    rel_error: float
    """Of `unscaled`; NaN if the number is 0 or not finite."""
    plain_rel_error: float
    """Of `plain`."""


def rounded(number: Number, form: Format) -> float:
    """`number` as `form` stores it."""
    if not is_finite(number):
        return math.copysign(form.max_value, number) if math.isinf(number) and not form.has_inf else float(number)
    exact = Fraction(number)
    if exact == 0:
        return 0.0
    exponent = _exponent(exact)
    beyond = exponent >= math.frexp(form.max_value)[1]  # decided early: dividing thousands of digits is slow
    quantum = max(exponent, form.min_normal_exponent) - form.mantissa_bits
    kept = exact if beyond else round(exact / Fraction(2) ** quantum) * Fraction(2) ** quantum  # rounds to even
    if beyond or abs(kept) > Fraction(form.max_value):
        size = math.inf if form.has_inf else form.max_value
    else:
        size = float(abs(kept))  # exact: every format is a subset of float64
    return -size if exact < 0 else size


def value_class(number: Number, stored: float, form: Format) -> str:
    """zero, underflow (of a nonzero number), subnormal, normal, overflow (of a finite number), inf or nan."""
    if not is_finite(number):
        if number != number:
            return "nan"
        return "inf" if form.has_inf else "overflow"
    if math.isinf(stored) or (not form.has_inf and abs(Fraction(number)) > Fraction(form.overflow_threshold)):
        return "overflow"
    if stored == 0:
        return "zero" if number == 0 else "underflow"
    return "subnormal" if abs(stored) < form.min_normal else "normal"


def bits(value: float, form: Format) -> tuple[str, str, str]:
    """Sign, exponent and mantissa bits of a value that `form` holds."""
    text = f"{_code(value, form):0{1 + form.exponent_bits + form.mantissa_bits}b}"
    return text[0], text[1 : 1 + form.exponent_bits], text[1 + form.exponent_bits :]


def neighbours(value: float, form: Format) -> tuple[float, float]:
    """The next values of `form` below and above a value that it holds; NaN if there is none."""
    if math.isnan(value):
        return math.nan, math.nan
    below, above = (_stepped(value, step, form) for step in (-1, 1))
    return below, above


def stored_values(number: Number) -> pd.DataFrame:
    """One row per format that is not scaled by block: format, label, sign, exponent, mantissa (bits), value, below,
    above (stored value and its neighbours), exact (whether the number is that value), abs_error, rel_error (NaN if
    not defined; as float64, where an error below its range is 0), kind (see `value_class`)."""
    rows = []
    for form in element_formats():
        value = rounded(number, form)
        sign, exponent, mantissa = bits(value, form)
        below, above = neighbours(value, form)
        error = _error(number, value)
        rows.append(
            {
                "format": form.name,
                "label": form.label,
                "sign": sign,
                "exponent": exponent,
                "mantissa": mantissa,
                "value": value,
                "below": below,
                "above": above,
                "exact": error == 0,
                "abs_error": _as_float(error),
                "rel_error": _relative(error, number),
                "kind": value_class(number, value, form),
            }
        )
    return pd.DataFrame(rows)


def scaling(number: Number, log2_scale: int, form: Format) -> Scaling:
    """The effect of a loss scale of 2^`log2_scale` on a gradient that is rounded to `form` in backward."""
    factor = Fraction(2) ** log2_scale
    scaled: Number = Fraction(number) * factor if is_finite(number) else number
    plain, stored = rounded(number, form), rounded(scaled, form)
    unscaled = rounded(Fraction(stored) / factor, FORMATS["fp32"]) if math.isfinite(stored) else stored
    return Scaling(
        plain=plain,
        plain_kind=value_class(number, plain, form),
        scaled=scaled,
        stored=stored,
        stored_kind=value_class(scaled, stored, form),
        unscaled=unscaled,
        rel_error=_relative(_error(number, unscaled), number),
        plain_rel_error=_relative(_error(number, plain), number),
    )


def rounded_operation(a: Number, b: Number, operation: str, form: Format) -> Operation:
    """`a` + `b` or `a` × `b`, with operands and result rounded to `form`. Raises `RunError` for another operation."""
    if operation not in ("+", "×"):
        raise RunError(f"operation={operation!r} is unknown; choose one of +, ×")
    first, second = rounded(a, form), rounded(b, form)
    exact: Number
    if math.isfinite(first) and math.isfinite(second):
        left, right = Fraction(first), Fraction(second)
        exact = left + right if operation == "+" else left * right
    else:
        exact = first + second if operation == "+" else first * second
    stored = rounded(exact, form)
    changed = not (stored == exact or exact != exact)
    without_effect = operation == "+" and changed and stored == first
    return Operation(first, second, exact, stored, value_class(exact, stored, form), changed, without_effect)


def accumulated(start: Number, addend: Number, count: int, form: Format) -> pd.DataFrame:
    """`addend` added `count` times to `start` in `form`, each sum rounded: count, stored, exact.

    One row for the start and one for each addition. The exact sum is that of the operands as given. Raises `RunError`
    for a count below 1 or beyond `MAX_ADDENDS`.
    """
    if not 1 <= count <= MAX_ADDENDS:
        raise RunError(f"count={count!r} is not possible; give a whole number from 1 to {MAX_ADDENDS}")
    step = rounded(addend, form)
    sums = [rounded(start, form)]
    while len(sums) <= count:
        total = rounded_operation(sums[-1], step, "+", form).stored
        if total == sums[-1] or not math.isfinite(total):  # a fixed point
            sums += [total] * (count + 1 - len(sums))
        else:
            sums.append(total)
    if is_finite(start) and is_finite(addend):
        exact = [_as_float(start + n * addend) for n in range(count + 1)]
    else:
        exact = [_as_float(computed(operator.add, start, addend))] * (count + 1)
    return pd.DataFrame({"count": np.arange(count + 1), "stored": sums, "exact": np.array(exact, dtype=np.float64)})


def element_formats() -> list[Format]:
    """The formats in which rounding does not depend on other values: those that are not scaled by block."""
    return [form for form in FORMATS.values() if not form.by_block]


def format_ranges(formats: Sequence[str] | None = None) -> pd.DataFrame:
    """Ranges as powers of two: format, label, subnormal_low, normal_low, top (log2 of the largest value), powers,
    precision_bits. `powers` is the number of powers of two in the format, subnormals included. By default all
    formats of 32 bits or fewer, the widest range first."""
    if formats is None:
        chosen = [form for form in element_formats() if form.bits <= 32]
        chosen.sort(key=lambda form: form.powers_of_two, reverse=True)
    else:
        chosen = [FORMATS[name] for name in formats]
    rows = [
        {
            "format": f.name,
            "label": f.label,
            "subnormal_low": float(f.min_subnormal_exponent),
            "normal_low": float(f.min_normal_exponent),
            "top": math.log2(f.max_value),
            "powers": f.powers_of_two,
            "precision_bits": f.mantissa_bits + 1,
        }
        for f in chosen
    ]
    return pd.DataFrame(rows)


def _exponent(exact: Fraction) -> int:
    """floor(log2) of the magnitude."""
    guess = abs(exact.numerator).bit_length() - exact.denominator.bit_length()
    return guess if abs(exact) >= Fraction(2) ** guess else guess - 1


def _code(value: float, form: Format) -> int:
    """The bits of a value of `form`, as an integer."""
    sign = int(math.copysign(1.0, value) < 0) << (form.exponent_bits + form.mantissa_bits)
    if math.isnan(value):
        quiet = 1 << (form.mantissa_bits - 1) if form.has_inf else (1 << form.mantissa_bits) - 1
        return sign | _top(form) | quiet
    if math.isinf(value):
        return sign | _top(form)
    size = Fraction(abs(value))
    if size < Fraction(form.min_normal):
        return sign | int(size / Fraction(2) ** form.min_subnormal_exponent)
    exponent = _exponent(size)
    mantissa = int((size / Fraction(2) ** exponent - 1) * 2**form.mantissa_bits)
    return sign | (exponent + form.bias) << form.mantissa_bits | mantissa


def _top(form: Format) -> int:
    """The highest exponent field, shifted to its position: infinity in formats that have it."""
    return ((1 << form.exponent_bits) - 1) << form.mantissa_bits


def _stepped(value: float, step: int, form: Format) -> float:
    size = _code(abs(value), form)
    place = (-size if value < 0 else size) + step
    last = _top(form) if form.has_inf else _code(form.max_value, form)
    if abs(place) > last:
        return math.nan
    code = abs(place)
    if form.has_inf and code == last:
        result = math.inf
    else:
        field, mantissa = code >> form.mantissa_bits, code & ((1 << form.mantissa_bits) - 1)
        whole = mantissa + ((1 << form.mantissa_bits) if field else 0)
        result = float(whole * Fraction(2) ** (max(field, 1) - form.bias - form.mantissa_bits))
    return -result if place < 0 else result


def _error(number: Number, value: float) -> Number:
    """The exact distance of `value` from the number."""
    if is_finite(number) and math.isfinite(value):
        return abs(Fraction(value) - Fraction(number))
    return 0.0 if number == value else math.inf if is_finite(number) else math.nan


def _relative(error: Number, number: Number) -> float:
    if not is_finite(number) or number == 0:
        return math.nan
    return _as_float(Fraction(error) / abs(Fraction(number))) if is_finite(error) else math.inf


def _as_float(number: Number) -> float:
    """The nearest float64; infinite beyond its range."""
    return rounded(number, FORMATS["fp64"])
