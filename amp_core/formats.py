"""Every fact about the number formats of mixed-precision training, in one place.

    >>> from amp_core.formats import FORMATS
    >>> FORMATS["fp16"].max_value, FORMATS["fp16"].min_normal, FORMATS["fp16"].min_subnormal
    (65504.0, 6.103515625e-05, 5.960464477539063e-08)

Sources: IEEE 754-2019 (fp32, fp16, fp64), the bfloat16 description of Google's TPUs, NVIDIA's A100 white paper (tf32)
and Micikevicius et al. 2022, "FP8 formats for deep learning" (e4m3 without infinities, e5m2 like IEEE). The tests hold
each value against `torch.finfo` for every format that torch has.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """A binary floating-point format: a sign bit, `exponent_bits`, and `mantissa_bits` without the implicit one."""

    name: str
    """Short name used in run folders and on pages, e.g. `fp16`."""
    label: str
    """How people write it, e.g. `FP16`."""
    dtype: str | None
    """The torch dtype's name without `torch.`; None where torch stores no such dtype (tf32 lives in float32)."""
    exponent_bits: int
    mantissa_bits: int
    max_value: float
    """Largest finite value."""
    has_inf: bool
    """Whether a value too large becomes infinity. e4m3 has none: such a value becomes NaN or the largest one, as the
    cast decides (torch saturates since 2.13 at the latest)."""

    @property
    def bias(self) -> int:
        """What is added to an exponent to store it."""
        return int(2 ** (self.exponent_bits - 1)) - 1

    @property
    def min_normal_exponent(self) -> int:
        """Exponent of the smallest normal value: 2 to this power is `min_normal`."""
        return 1 - self.bias

    @property
    def min_subnormal_exponent(self) -> int:
        """Exponent of the smallest nonzero value."""
        return self.min_normal_exponent - self.mantissa_bits

    @property
    def max_exponent(self) -> int:
        """floor(log2) of the largest finite value."""
        return math.frexp(self.max_value)[1] - 1

    @property
    def min_normal(self) -> float:
        """Smallest value with full precision."""
        return math.ldexp(1.0, self.min_normal_exponent)

    @property
    def min_subnormal(self) -> float:
        """Smallest nonzero value."""
        return math.ldexp(1.0, self.min_subnormal_exponent)

    @property
    def flush_threshold(self) -> float:
        """Largest magnitude that rounds to zero: half the smallest subnormal, since ties go to even."""
        return self.min_subnormal / 2

    @property
    def overflow_threshold(self) -> float:
        """Middle between `max_value` and what the next step would be: larger magnitudes overflow. So does the middle,
        since ties go to even; only in e4m3, whose largest mantissa is even, it becomes `max_value`."""
        return self.max_value + math.ldexp(1.0, self.max_exponent - self.mantissa_bits - 1)

    @property
    def epsilon(self) -> float:
        """Distance from 1 to the next larger value."""
        return math.ldexp(1.0, -self.mantissa_bits)

    @property
    def powers_of_two(self) -> int:
        """How many powers of two, subnormals included, lie between `min_subnormal` and `max_value`."""
        return self.max_exponent - self.min_subnormal_exponent + 1


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("fp64", "FP64", "float64", 11, 52, (2 - 2**-52) * 2.0**1023, True),
        Format("fp32", "FP32", "float32", 8, 23, (2 - 2**-23) * 2.0**127, True),
        Format("tf32", "TF32", None, 8, 10, (2 - 2**-10) * 2.0**127, True),
        Format("fp16", "FP16", "float16", 5, 10, 65504.0, True),
        Format("bf16", "BF16", "bfloat16", 8, 7, (2 - 2**-7) * 2.0**127, True),
        Format("fp8-e4m3", "FP8 E4M3", "float8_e4m3fn", 4, 3, 448.0, False),
        Format("fp8-e5m2", "FP8 E5M2", "float8_e5m2", 5, 2, 57344.0, True),
    )
}
"""All formats by short name, widest first."""

FORMAT_OF_DTYPE: dict[str, Format] = {f.dtype: f for f in FORMATS.values() if f.dtype is not None}
"""The format that a torch dtype stores, by the dtype's name (`float16`, `bfloat16`, …)."""
