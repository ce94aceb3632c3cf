"""Every fact about the number formats of mixed-precision training, in one place.

    >>> from amp_core.formats import FORMATS
    >>> FORMATS["fp16"].max_value, FORMATS["fp16"].min_normal, FORMATS["fp16"].min_subnormal
    (65504.0, 6.103515625e-05, 5.960464477539063e-08)

Sources: IEEE 754-2019 (fp32, fp16, fp64), the bfloat16 description of Google's TPUs, NVIDIA's A100 white paper (tf32)
and Micikevicius et al. 2022, "FP8 formats for deep learning" (e4m3 without infinities, e5m2 like IEEE). The tests check
each value against `torch.finfo` for every format that torch has.

Everything that other modules need to know about a format is a property here: how it is scaled, how its dtype is spelt
elsewhere, what tensor cores call it. To add a format, add an entry to `FORMATS`. Formats that exist only inside
quantized tensors (FP6, FP4, INT8) and the recipes that scale them by block are in `quantization`.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Scaling:
    """How the values of a tensor are scaled before they are stored in a format."""

    by: str
    """`loss`: by the loss scale alone, one power of two for the whole model. `tensor`: by a power of two per tensor,
    from its largest magnitude. `block`: by one scale per block of values."""
    block: int | None = None
    """Values that share a scale, where `by` is `block`."""
    scale_format: str | None = None
    """Format in which a block's scale is stored, e.g. `e8m0`, where `by` is `block`."""

    def __post_init__(self) -> None:
        if self.by not in ("loss", "tensor", "block"):
            raise ValueError(f"by={self.by!r} is unknown; choose loss, tensor or block")
        if (self.by == "block") != (self.block is not None and self.scale_format is not None):
            raise ValueError("block and scale_format are required with by='block' and must be None otherwise")


BY_LOSS_SCALE = Scaling("loss")
BY_TENSOR = Scaling("tensor")


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
    """Whether overflow gives infinity. e4m3 has no infinity: overflow gives NaN or saturates, as the cast decides
    (torch saturates since 2.13 at the latest)."""
    scaling: Scaling = BY_LOSS_SCALE
    """How training in this format scales a tensor."""
    autocast: bool = False
    """Whether torch.autocast takes its dtype."""
    family: str = ""
    """What GPUs, data sheets and kernel names call it, e.g. `fp8` for both FP8 formats; empty if that
    is its name. See `kernel_precision`."""
    spellings: tuple[str, ...] = ()
    """Other names of its dtype in lower case: of C++, CUDA and CUTLASS (`half`, `__half`, `half_t`), without the
    namespace `c10::`, and of XLA (`f16`)."""
    kernel_tokens: tuple[str, ...] = ()
    """How kernel names write it between underscores and other types, e.g. `f16` in `f16f16_f16f32_f32`."""
    stored_bits: int = 0
    """Bits of an element in memory where they differ from `bits`: tf32 is kept in 32."""

    @property
    def bits(self) -> int:
        """Sign, exponent and mantissa."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def memory_bits(self) -> int:
        """Bits that an element takes in memory."""
        return self.stored_bits or self.bits

    @property
    def narrow(self) -> bool:
        """Whether it has 16 bits or fewer."""
        return self.bits <= 16

    @property
    def by_block(self) -> bool:
        """Whether the result of rounding a value depends on the other values of its block."""
        return self.scaling.by == "block"

    @property
    def has_fp32_range(self) -> bool:
        """Whether it has FP32's exponents, so that no loss scale is needed."""
        return self.exponent_bits >= 8

    @property
    def kernel_precision(self) -> str:
        """Its name in kernels and for tensor cores: `family`, or its own name."""
        return self.family or self.name

    @property
    def width(self) -> tuple[int, int]:
        """Sort key of formats: bits, then bits of the mantissa."""
        return self.bits, self.mantissa_bits

    @property
    def bias(self) -> int:
        """Added to an exponent to store it; 0 without exponent bits."""
        return max(int(2 ** (self.exponent_bits - 1)) - 1, 0)

    @property
    def min_normal_exponent(self) -> int:
        """Exponent of the smallest normal value: 2 to this power is `min_normal`. The exponent field 0 is that of zero
        and subnormals, except where there is no mantissa."""
        return (1 if self.mantissa_bits else 0) - self.bias

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
        """Midpoint of `max_value` and the next value in a format with more exponents: larger magnitudes overflow. The
        midpoint itself overflows too, since ties go to even; in e4m3, whose largest mantissa is even, it rounds
        down."""
        return self.max_value + math.ldexp(1.0, self.max_exponent - self.mantissa_bits - 1)

    @property
    def epsilon(self) -> float:
        """Distance from 1 to the next larger value."""
        return math.ldexp(1.0, -self.mantissa_bits)

    @property
    def powers_of_two(self) -> int:
        """Number of powers of two from `min_subnormal` to `max_value`."""
        return self.max_exponent - self.min_subnormal_exponent + 1


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format(
            "fp64", "FP64", "float64", 11, 52, (2 - 2**-52) * 2.0**1023, True,
            spellings=("double", "f64"), kernel_tokens=("fp64", "f64"),
        ),
        Format(
            "fp32", "FP32", "float32", 8, 23, (2 - 2**-23) * 2.0**127, True,
            spellings=("float", "f32"), kernel_tokens=("fp32", "f32"),
        ),
        Format(
            "tf32", "TF32", None, 8, 10, (2 - 2**-10) * 2.0**127, True,
            stored_bits=32, spellings=("tfloat32", "tfloat32_t"), kernel_tokens=("tf32",),
        ),
        Format(
            "fp16", "FP16", "float16", 5, 10, 65504.0, True,
            autocast=True, spellings=("half", "__half", "half_t", "f16"), kernel_tokens=("fp16", "f16"),
        ),
        Format(
            "bf16", "BF16", "bfloat16", 8, 7, (2 - 2**-7) * 2.0**127, True,
            autocast=True, spellings=("__nv_bfloat16", "nv_bfloat16", "bfloat16_t"), kernel_tokens=("bf16",),
        ),
        Format(
            "fp8-e4m3", "FP8 E4M3", "float8_e4m3fn", 4, 3, 448.0, False,
            scaling=BY_TENSOR, family="fp8", spellings=("__nv_fp8_e4m3", "float_e4m3_t", "f8e4m3fn"),
            kernel_tokens=("e4m3",),
        ),
        Format(
            "fp8-e5m2", "FP8 E5M2", "float8_e5m2", 5, 2, 57344.0, True,
            scaling=BY_TENSOR, family="fp8", spellings=("__nv_fp8_e5m2", "float_e5m2_t", "f8e5m2"),
            kernel_tokens=("e5m2",),
        ),
    )
}  # fmt: skip
"""All formats by short name, widest first."""

FORMAT_OF_DTYPE: dict[str, Format] = {f.dtype: f for f in FORMATS.values() if f.dtype is not None}
"""The format that a torch dtype stores, by the dtype's name (`float16`, `bfloat16`, …): what the recorder measures."""


@dataclass(frozen=True)
class Integer:
    """A dtype that holds whole numbers or truth values."""

    dtype: str
    """The torch dtype's name without `torch.`."""
    memory_bits: int
    spellings: tuple[str, ...] = ()
    """As in `Format`."""
    kernel_precision: str | None = None
    """What kernels and tensor cores call it; None where neither multiplies it."""


INTEGERS: dict[str, Integer] = {
    i.dtype: i
    for i in (
        Integer("int64", 64, ("long", "long int", "long long")),
        Integer("int32", 32, ("int",)),
        Integer("int16", 16, ("short", "short int")),
        Integer("int8", 8, ("char", "signed char"), "int8"),
        Integer("uint64", 64, ("unsigned long", "unsigned long int")),
        Integer("uint32", 32, ("unsigned int",)),
        Integer("uint16", 16, ("unsigned short", "unsigned short int")),
        Integer("uint8", 8, ("unsigned char",), "int8"),
        Integer("bool", 8),
    )
}
"""Integer and boolean dtypes, by torch's name."""


def format_of(spelling: object) -> Format | None:
    """The format that a dtype stores, by any of its names: `float16`, `torch.float16`, `c10::Half`, `half`, `fp16`.

    None for integers and for anything that is not a dtype.
    """
    if not isinstance(spelling, str):
        return None
    name = _plain(spelling)
    return next((f for f in FORMATS.values() if name in (f.dtype, f.name) or name in f.spellings), None)


def dtype_of(spelling: str) -> str | None:
    """torch's name of a dtype, integers included, by any of its names; None if torch has no such dtype."""
    dtype = format_of(spelling) or _integer_of(spelling)
    return None if dtype is None else dtype.dtype


def kernel_precision_of(spelling: str) -> str | None:
    """The name of a dtype in kernels and for tensor cores (`Format.kernel_precision`), by any of its names."""
    dtype = format_of(spelling) or _integer_of(spelling)
    return None if dtype is None else dtype.kernel_precision


def memory_bits_of(kernel_precision: str) -> int | None:
    """Bits that an element of `kernel_precision` takes in memory, e.g. 32 for tf32; None for an unknown name."""
    for form in FORMATS.values():
        if form.kernel_precision == kernel_precision:
            return form.memory_bits
    return next((i.memory_bits for i in INTEGERS.values() if i.kernel_precision == kernel_precision), None)


def element_bytes(spelling: object) -> int | None:
    """Bytes that an element of a dtype takes, by any of its names; None if it is not a dtype."""
    dtype = format_of(spelling) or _integer_of(spelling)
    return None if dtype is None else max(dtype.memory_bits // 8, 1)


def narrowest_first() -> list[Format]:
    """All formats in order of `Format.width`, the order of charts and of type promotion."""
    return sorted(FORMATS.values(), key=lambda f: f.width)


def limits_to_show() -> list[str]:
    """Names of the formats whose limits a chart of recorded values may show: 16 bits or fewer, not scaled by block."""
    return [f.name for f in FORMATS.values() if f.narrow and not f.by_block]


def autocast_dtypes() -> tuple[str, ...]:
    """torch's names of the dtypes that autocast accepts."""
    return tuple(f.dtype for f in FORMATS.values() if f.autocast and f.dtype is not None)


def _integer_of(spelling: object) -> Integer | None:
    if not isinstance(spelling, str):
        return None
    name = _plain(spelling)
    return next((i for i in INTEGERS.values() if name == i.dtype or name in i.spellings), None)


def _plain(spelling: str) -> str:
    return spelling.removeprefix("torch.").removeprefix("c10::").lower()
