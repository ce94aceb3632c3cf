"""Parse a number as people write it, exactly.

    >>> parse_number("1 + 2^-11")
    Fraction(2049, 2048)

Accepts sums of products of literals and integer powers. Python evaluates nothing, and expensive input is refused.
"""

import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from amp_core.schema import RunError

Number = Fraction | float
"""An exact number; a float only if it is infinite or NaN."""

MAX_DIGITS = 60
LARGEST_POWER = 5000
"""Beyond the range of every format; larger powers would only cost time."""
MAX_BITS = 20_000
"""Limit of a numerator or denominator: 10^5000 has 16,610. Sums of thousands of longer ones would take minutes."""

_TOKEN = re.compile(r"\s*(?:(\d+\.?\d*(?:e[-+]?\d+)?|\.\d+(?:e[-+]?\d+)?|inf|nan)|(\*\*|[-+*/^]))", re.IGNORECASE)
_WRITTEN = str.maketrans({"−": "-", "×": "*", "·": "*", "∞": "inf", ",": None, "_": None})


def parse_number(text: str) -> Number:
    """A number as people write it: 0.1, 1e-8, 2^-24, 1.5*2^-3, 1/3, 1+2^-11, inf, nan.

    Raises `RunError` for anything else, and for powers beyond `LARGEST_POWER`.
    """
    written = text.strip().translate(_WRITTEN)
    if len(written) > MAX_DIGITS:
        raise RunError(f"number={text[:20] + '…'!r} is longer than {MAX_DIGITS} characters; give a shorter one")
    tokens: list[str] = []
    at = 0
    while at < len(written):
        match = _TOKEN.match(written, at)
        if match is None:
            raise _not_a_number(text)
        tokens.append((match[1] or match[2]).lower().replace("**", "^"))
        at = match.end()
    value = _sum(tokens, text)
    if tokens:
        raise _not_a_number(text)
    if isinstance(value, Fraction) and max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise RunError(f"number={text!r} has too many digits; give one of fewer than {LARGEST_POWER}")
    return value


def is_finite(number: Number) -> bool:
    """Whether it is neither infinite nor NaN; `math.isfinite` fails for fractions beyond the range of a float."""
    return isinstance(number, Fraction) or math.isfinite(number)


def computed(operation: Callable[[Number, Number], Number], a: Number, b: Number) -> Number:
    """A sum, difference, product or quotient of `a` and `b`; as for floats if one is not finite."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return operation(a, b)
    # With infinity or NaN only the sign of the other operand, which may exceed the range of a float, counts.
    left, right = (float((n > 0) - (n < 0)) if isinstance(n, Fraction) else n for n in (a, b))
    value = operation(left, right)
    return value if not math.isfinite(value) else Fraction(value)


def _sum(tokens: list[str], text: str) -> Number:
    total = _product(tokens, text)
    while tokens and tokens[0] in "+-":
        operation = operator.sub if tokens.pop(0) == "-" else operator.add
        total = computed(operation, total, _product(tokens, text))
    return total


def _product(tokens: list[str], text: str) -> Number:
    value = _power(tokens, text)
    while tokens and tokens[0] in "*/":
        divide = tokens.pop(0) == "/"
        other = _power(tokens, text)
        if divide and other == 0:
            raise RunError(f"number={text!r} divides by 0; give a nonzero divisor")
        value = computed(operator.truediv if divide else operator.mul, value, other)
    return value


def _power(tokens: list[str], text: str) -> Number:
    if tokens and tokens[0] in "+-":
        return -_power(tokens, text) if tokens.pop(0) == "-" else _power(tokens, text)
    base = _literal(tokens, text)
    if tokens and tokens[0] == "^":
        tokens.pop(0)
        sign = -1 if tokens and tokens[0] == "-" else 1
        if tokens and tokens[0] in "+-":
            tokens.pop(0)
        exponent = sign * _literal(tokens, text)
        if not is_finite(base) or not is_finite(exponent) or Fraction(exponent).denominator != 1:
            raise RunError(f"number={text!r} has a fractional exponent; give a whole one, as in 2^-24")
        if abs(exponent) > LARGEST_POWER or (base == 0 and exponent < 0) or not -(10**6) <= base <= 10**6:
            raise RunError(f"number={text!r} has an exponent out of range; give exponents up to {LARGEST_POWER}")
        power: Fraction = Fraction(base) ** int(exponent)
        return power
    return base


def _literal(tokens: list[str], text: str) -> Number:
    if not tokens or tokens[0] in "+-*/^":
        raise _not_a_number(text)
    word = tokens.pop(0)
    if word in ("inf", "nan"):
        return float(word)
    if "e" in word and abs(int(word.split("e")[1])) > LARGEST_POWER:
        raise RunError(f"number={text!r} has an exponent out of range; give exponents up to {LARGEST_POWER}")
    return Fraction(word)


def _not_a_number(text: str) -> RunError:
    return RunError(f"number={text!r} is not a number; give one such as 0.1, 1e-8, 2^-24, 65504 or inf")
