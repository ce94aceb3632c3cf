"""Myths about number formats, each with its correction; the numbers are computed, not copied.

>>> [myth.claim for myth in format_myths() if myth.rating == "false"][0]
'0.125 has the mantissa 1.25 and the exponent −1'
"""

from dataclasses import dataclass
from fractions import Fraction

from amp_core.analysis.format_lab.rounding import bits, neighbours, rounded, rounded_operation
from amp_core.formats import FORMATS, Format
from amp_core.text.formatting import number


@dataclass(frozen=True)
class FormatMyth:
    """A common claim about number formats, and its correction."""

    claim: str
    rating: str
    """`true`, `imprecise` or `false`."""
    correction: str


def format_myths() -> list[FormatMyth]:
    """The most common myths about number formats."""
    fp32, tf32, fp16, bf16 = (FORMATS[name] for name in ("fp32", "tf32", "fp16", "bf16"))
    e4m3, e5m2 = FORMATS["fp8-e4m3"], FORMATS["fp8-e5m2"]
    _, exponent, mantissa = bits(0.125, fp16)
    sixth = rounded(Fraction("1e-5"), fp16)
    least, tie = fp16.min_subnormal, fp16.flush_threshold
    over_tie = neighbours(tie, fp32)[1]
    integer = 2**24 + 1
    lost, kept = (rounded_operation(Fraction(w), Fraction(w) / 2048, "+", fp16) for w in (1, Fraction(3, 2)))
    sure = rounded_operation(Fraction(2047, 1024), Fraction(2047, 1024) / 4096, "+", fp16)
    band = rounded(Fraction(3, 2) * Fraction(tie), fp16)
    return [
        FormatMyth(
            "FP16 has 1 sign, 5 exponent and 10 mantissa bits, FP32 has 1, 8 and 23",
            "true",
            f"FP16 is {_layout(fp16)}, FP32 is {_layout(fp32)}. A leading 1 is implied, so normal values have "
            f"{fp16.mantissa_bits + 1} and {fp32.mantissa_bits + 1} significant bits.",
        ),
        FormatMyth(
            "0.125 has the mantissa 1.25 and the exponent −1",
            "false",
            f"That is decimal notation. In binary it is 1.0 × 2^−3: FP16 stores the mantissa bits {mantissa} and the "
            f"exponent bits {exponent}, which is {int(exponent, 2)}, the bias {fp16.bias} included.",
        ),
        FormatMyth(
            "Numbers below 6e-5 are 0 in FP16",
            "false",
            f"{number(fp16.min_normal)} = 2^{_signed(fp16.min_normal_exponent)} is the smallest normal value. "
            f"Subnormals extend down to {number(least)} = 2^{_signed(fp16.min_subnormal_exponent)} with "
            f"progressively fewer bits: 10^−5 is stored as {number(sixth, digits=4)}. "
            f"Only values up to {number(tie)} = 2^{_signed(fp16.min_subnormal_exponent - 1)} "
            f"become {rounded(tie, fp16):g};  the next FP32 number above it becomes {number(rounded(over_tie, fp16))}.",
        ),
        FormatMyth(
            "Gradients from 2^−27 to 2^−24 vanish in FP16 without loss scaling",
            "imprecise",
            f"Values up to 2^−25 become 0. Those between 2^−25 and 2^−24 become 2^−24: 1.5 × 2^−25 is stored as "
            f"{number(band)}, so they survive, with a relative error of up to 100 %.",
        ),
        FormatMyth(
            f"FP16 has {fp16.powers_of_two} powers of two, FP32 has 264",
            "imprecise",
            f"FP16 has {fp16.powers_of_two}, including subnormals. Counted the same way, FP32 has {fp32.powers_of_two} "
            f"({tf32.powers_of_two} is TF32's number); "
            f"without subnormals, they have {_normal_powers(fp16)} and {_normal_powers(fp32)}.",
        ),
        FormatMyth(
            "An update 2,048 times smaller than its weight is lost in FP16",
            "imprecise",
            f"It depends on where the weight lies between two powers of two. 1 + 1/2048 stays {lost.stored:g}, but "
            f"1.5 + 1.5/2048 becomes {kept.stored:.8g}. Near 2 it takes a ratio of 4,096 or more: there "
            f"{sure.a:.6g} + {sure.a:.6g}/4096 stays {sure.stored:.6g}. In BF16 the ratios are 256 to 512.",
        ),
        FormatMyth(
            "BF16 has the range of FP32 with less precision",
            "true",
            f"Both have {bf16.exponent_bits} exponent bits: the largest values are {number(bf16.max_value)} and "
            f"{number(fp32.max_value)}. BF16 keeps {bf16.mantissa_bits + 1} of "
            f"{fp32.mantissa_bits + 1} significant bits: in BF16, 256 + 1 is {rounded(257, bf16):g}.",
        ),
        FormatMyth(
            "PyTorch supports BF16 only on CPUs",
            "false",
            "Outdated: GPUs of compute capability 8.0 (Ampere) and newer support BF16 on tensor cores, and autocast "
            "uses them.",
        ),
        FormatMyth(
            "TF32 has 19 bits",
            "true",
            f"{_layout(tf32)}, {1 + tf32.exponent_bits + tf32.mantissa_bits} in total. It exists only inside "
            "tensor cores: in memory, a value takes 32 bits.",
        ),
        FormatMyth(
            "IEEE 754 defines the formats from FP16 to FP256",
            "true",
            "binary16 to binary256. BF16, TF32 and FP8 are not among them: "
            f"{e4m3.label} has no infinity and reaches {e4m3.max_value:g}, {e5m2.label} is built like FP16 and reaches "
            f"{e5m2.max_value:g}.",
        ),
        FormatMyth(
            "Types have 64 or 32 bits; an INT32 has 1 sign bit and 31 for the number",
            "imprecise",
            "True of integers, but mixed precision concerns floating-point formats. INT32 values are evenly spaced; "
            f"FP32, with as many bits, cannot represent {integer:,} and stores {rounded(integer, fp32):,.0f}.",
        ),
        FormatMyth(
            "With mixed precision the parameters are stored in FP16",
            "false",
            "Under autocast they stay in FP32; an autocast region casts them when an operator runs in 16 bits and "
            "caches the copy until the region ends. A model converted with model.half() does store them in 16 bits, "
            "and loses updates as above.",
        ),
    ]


def _layout(form: Format) -> str:
    return f"1 + {form.exponent_bits} + {form.mantissa_bits}"


def _normal_powers(form: Format) -> int:
    return form.max_exponent - form.min_normal_exponent + 1


def _signed(exponent: int) -> str:
    return f"{exponent}".replace("-", "−")
