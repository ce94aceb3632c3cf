"""Random values, names and columns that no valid run has.

>>> value(random.Random(1), depth=2)
"""

import math
import random
from typing import Any

import numpy as np
import pyarrow as pa

MARKUP = ("<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "=1+1", "@SUM(A1)", "-2+3|cmd", "+1", "\t=1")
"""What a name must not do in a page, a report or a spreadsheet."""

TYPES = (
    pa.int8(), pa.uint64(), pa.int64(), pa.float16(), pa.float32(), pa.float64(), pa.bool_(), pa.string(), pa.binary(),
    pa.large_string(), pa.list_(pa.int64()), pa.list_(pa.float64()), pa.timestamp("us"), pa.date32(), pa.null(),
    pa.decimal128(10, 2), pa.dictionary(pa.int8(), pa.string()), pa.struct([("a", pa.int64())]), pa.duration("s"),
)  # fmt: skip
_NUMBERS = (0, 1, -1, 2, 100, 2**31, 2**53 + 1, 2**63 - 1, -(2**63))
_REALS = (0.0, -0.0, 1.0, -1.0, 0.5, math.nan, math.inf, -math.inf, 1e308, 5e-324, 65504.0)


def text(rng: random.Random) -> str:
    """A name: empty, long, with control characters, or with markup."""
    some = ("", "w", "..", "a/b", "x" * 300, "\x00", "‮", "é\ud7ff", "\n\n", "$x$", "`", "[a](javascript:0)", *MARKUP)
    return rng.choice(some) + rng.choice(("", "", ".weight", "7"))


def value(rng: random.Random, depth: int) -> Any:
    """An unexpected JSON value, nested at most `depth` times."""
    choice = rng.randrange(9 if depth else 7)
    if choice == 7:
        return {text(rng): value(rng, depth - 1) for _ in range(rng.randrange(4))}
    if choice == 8:
        return [value(rng, depth - 1) for _ in range(rng.randrange(4))]
    some = (None, True, rng.choice(_NUMBERS), rng.choice(_REALS), text(rng), 10 ** rng.randrange(40), "65536")
    return some[choice]


def array(rng: random.Random, kind: pa.DataType, rows: int) -> pa.Array:
    """Values of that type that no valid run has."""

    def item(kind: pa.DataType) -> Any:
        if rng.random() < 0.05:
            return None
        if pa.types.is_boolean(kind):
            return rng.random() < 0.5
        if pa.types.is_integer(kind):
            low, high = (0, 100) if kind.bit_width < 64 or not pa.types.is_signed_integer(kind) else (-(2**63), 2**63)
            small = rng.randrange(5)
            return small if rng.random() < 0.7 else min(max(rng.choice(_NUMBERS), low), high - 1)
        if pa.types.is_floating(kind):
            return rng.choice(_REALS)
        if pa.types.is_list(kind):
            return [item(kind.value_type) for _ in range(rng.choice((0, 1, 5, 100)))]
        if pa.types.is_struct(kind):
            return {"a": rng.randrange(5)}
        if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind):
            known = ("weight_grad", "output_grad", "float16", "float32", "skipped", "warning", "calls", "cuda:0", "yes")
            return rng.choice(known) if rng.random() < 0.5 else text(rng)
        if pa.types.is_binary(kind):
            return rng.randbytes(3)
        return None if pa.types.is_null(kind) else rng.randrange(100)

    def fits(value: Any) -> Any:
        return value if not pa.types.is_decimal(kind) or value is None else min(value, 99)

    values = [fits(item(kind)) for _ in range(rows)]
    if pa.types.is_float16(kind):
        values = [None if v is None else np.float16(v) for v in values]
    if pa.types.is_dictionary(kind):
        return pa.array(values, pa.string()).dictionary_encode()
    return pa.array(values, kind)
