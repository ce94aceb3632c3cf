"""Numbers as people read them: three significant digits, a unit on each, powers of two for loss scales.

    >>> scale(65536.0), size(3_400_000), percent(0.0123), duration(75)
    ('2¹⁶', '3.24 MiB', '1.23 %', '1 min 15 s')

What was not measured (None, NaN) is an en dash, never 0.
"""

import math
import re
from collections.abc import Collection

NONE = "–"
KIND_LABELS = {
    "output_grad": "Output gradients",
    "weight_grad": "Weight gradients",
    "activation": "Activations",
    "weight": "Weights",
}
"""Labels of the kinds of measured tensors, in the order in which they are offered."""
_MIN_COUNT_OF_PERCENT = 10
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_SEVERAL = re.compile(
    r"\b(call|cast|change|column|dtype|factor|jump|launch|layer|module|parameter|pass|result|row|setting|step|"
    r"tensor|thing|update|use|value|wait)(?:(?<=pass|unch)e)?s\b"
)
"""Plurals of the counted units of findings."""


def number(value: float | None, unit: str = "", digits: int = 3) -> str:
    """`value` with its unit, to `digits` significant digits."""
    if _missing(value):
        return NONE
    assert value is not None
    if math.isinf(value):
        text = "∞" if value > 0 else "−∞"
    elif value == 0:
        text = "0"
    elif 1e-3 <= abs(value) < 1e6:
        places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
        text = f"{value:,.{places}f}".replace("-", "−")
    else:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        text = f"{mantissa} × 10{str(int(exponent)).translate(_RAISED)}".replace("-", "−")
    return f"{text} {unit}".rstrip()


def loss(value: float | None) -> str:
    """A loss; NaN differs from a loss that was not recorded."""
    return "NaN" if value is not None and value != value else number(value)


def count(value: float | None) -> str:
    """A whole number with thousands set apart."""
    return NONE if _missing(value) else f"{round(value or 0):,}"


def span(low: float | None, high: float | None, unit: str = "") -> str:
    """`23.0–24.9 ms`: a range to three significant digits, or to as many more, up to six, as tell its ends apart."""
    ends = (number(low), number(high))
    for digits in (4, 5, 6):
        if ends[0] != ends[1] or low == high:
            break
        ends = (number(low, digits=digits), number(high, digits=digits))
    return f"{ends[0] if ends[0] == ends[1] else '–'.join(ends)} {unit}".rstrip()


def whole_range(low: float | None, high: float | None, digits: int = 2) -> str:
    """`74,000–97,000`: an estimated range of whole numbers to so many digits, rounded outwards."""
    if _missing(low) or _missing(high):
        return NONE
    assert low is not None and high is not None
    ends = []
    for value, outwards in ((low, math.floor), (high, math.ceil)):
        unit = 10 ** max(0, math.floor(math.log10(value)) + 1 - digits) if value >= 1 else 1
        ends.append(count(outwards(value / unit) * unit))
    return ends[0] if ends[0] == ends[1] else f"{ends[0]}–{ends[1]}"


def mean_count(value: float) -> str:
    """A mean of counts, such as calls per step: `3`, `3.33`, `11,244`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def compact(value: float) -> str:
    """A large count with three digits and k (thousand), M (million) or G."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return number(value / size, unit)
    return count(value)


def plural(value: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{value:,} {noun}" if value == 1 else f"{value:,} {noun}s"


def ratio(value: float | None, low: float | None, high: float | None) -> str:
    """`2.31 × (2.28–2.35)`: a ratio with its interval, if it has one: a baseline has none."""
    if _missing(value):
        return NONE
    interval = "" if _missing(low) or _missing(high) or low == high else f" ({number(low)}–{number(high)})"
    return f"{number(value)} ×{interval}"


def scale(value: float | None) -> str:
    """A loss scale: as a power of two if it is one, as it nearly always is, else as a number."""
    if _missing(value):
        return NONE
    assert value is not None
    mantissa, exponent = math.frexp(value)
    if mantissa == 0.5:
        return f"2{str(exponent - 1).translate(_RAISED)}" if exponent != 1 else "1"
    return number(value)


def exactly(value: float) -> str:
    """A stored value with all its digits; as a power of two if that is shorter."""
    if value != value:
        return NONE
    if math.isinf(value) or value == 0:
        return number(value)
    power = scale(abs(value))
    if power.startswith("2") and "." not in power and not 2.0**-7 <= abs(value) <= 2.0**17 and "×" not in power:
        return f"{'−' if value < 0 else ''}{power}"
    mantissa, _, exponent = repr(float(value)).partition("e")
    mantissa = mantissa.removesuffix(".0").replace("-", "−")
    return f"{mantissa} × 10{str(int(exponent)).translate(_RAISED)}" if exponent else mantissa


def raised(text: str) -> str:
    """`2^−24` in a text as 2⁻²⁴."""
    return re.sub(r"\^([-−]?\d+)", lambda match: match[1].replace("−", "-").translate(_RAISED), text)


def without_arguments(name: str) -> str:
    """A kernel's name without return type, torch's namespaces and arguments; of a compiled file, its folder's name."""
    if match := _COMPILED_FILE.fullmatch(name):
        return match[1]
    if (demangled := _demangled(name)) is not None:
        return demangled
    text = re.sub(r"^void |at::native::|at::cuda::|at::detail::|\(anonymous namespace\)::|<unnamed>::", "", name)
    text = re.sub(r" ?\((?!anonymous).*", "", text) if "<" in text or text.endswith(")") else text
    return text or name


def _demangled(name: str) -> str | None:
    """The name of a function that was mangled by the rules of Itanium's C++ ABI, with the first argument of its
    template alone: `cutlass::device_kernel<gemm::kernel::GemmUniversal…>`. None for other names."""
    if (start := re.match(r"_Z(N?)(?=[1-9])", name)) is None:
        return None
    function, at = _mangled_parts(name, start.end(), nested=bool(start[1]))
    if not function:
        return None
    if (argument := re.compile(r"I(N?)(?:S[\dA-Z]*_)?(?=[1-9])").match(name, at)) is None:
        return f"{function}<…>" if name[at : at + 1] == "I" else function
    first, _ = _mangled_parts(name, argument.end(), nested=bool(argument[1]))
    return f"{function}<{first}…>"


def _mangled_parts(name: str, at: int, *, nested: bool) -> tuple[str, int]:
    """The names at a place of a mangled one, `a::b` for `1a1b`, of which there are several where it is `nested`; and
    the place behind them. Empty if they are cut off."""
    parts: list[str] = []
    while (length := re.compile(r"\d+").match(name, at)) is not None and (nested or not parts):
        part = name[length.end() : length.end() + int(length[0])]
        if len(part) < int(length[0]) or not re.fullmatch(r"\w+", part):
            return "", at
        parts.append(part)
        at = length.end() + len(part)
    return "::".join(part for part in parts if not part.startswith("_GLOBAL__N")), at


_COMPILED_FILE = re.compile(r"/(?:[^/]+/)*([^/]+)/[^/]+\.\w+")
"""How the kernels of some accelerators are named: by the path of the file that was compiled to them."""
MAX_KERNEL_CHARS = 100
"""A name of that length still reads within a sentence."""


def kernel_in_words(name: str) -> str:
    """`without_arguments`, and of a long name without those of its template: `flash_fwd_kernel<…>`."""
    text = without_arguments(name)
    if len(text) <= MAX_KERNEL_CHARS:
        return text
    return shortened(f"{text.partition('<')[0]}<…>" if "<" in text else text)


def shortened(name: str) -> str:
    """The first `MAX_KERNEL_CHARS` characters of a name, with … if it is longer."""
    return name if len(name) <= MAX_KERNEL_CHARS else f"{name[:MAX_KERNEL_CHARS]}…"


def join_words(words: Collection[str], joint: str = "and") -> str:
    """`a`, `a and b`, `a, b and c`."""
    *first, last = words
    return f"{', '.join(first)} {joint} {last}" if first else last


def percent(fraction: float | None) -> str:
    """A fraction 0–1 in percent."""
    return NONE if _missing(fraction) else number((fraction or 0.0) * 100, "%")


def share_of(part: float | None, whole: float | None) -> str:
    """`1 of 400`, `40 of 400 (10.0 %)`: a share by its counts. A count of a few has no percentage: digits that follow
    from one more or less mean nothing."""
    if _missing(part) or _missing(whole):
        return NONE
    assert part is not None and whole is not None
    counts = f"{count(part)} of {count(whole)}"
    return f"{counts} ({percent(part / whole)})" if part >= _MIN_COUNT_OF_PERCENT and whole else counts


def size(bytes_: float | None) -> str:
    """Bytes with a binary prefix (KiB = 1024 bytes)."""
    if _missing(bytes_):
        return NONE
    value = float(bytes_ or 0)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return number(value, unit)
        value /= 1024
    raise AssertionError("unreachable")


def duration(seconds: float | None) -> str:
    """A time span in its two largest units."""
    if _missing(seconds):
        return NONE
    assert seconds is not None
    if seconds < 1:
        return number(seconds * 1000, "ms")
    if seconds < 60:
        return number(seconds, "s")
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def about(seconds: float) -> str:
    """An estimated time span: whole seconds, or whole minutes if it is long."""
    if seconds < 100:
        return f"about {max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"about {minutes} min" if minutes < 60 else f"about {minutes // 60} h {minutes % 60} min"


def amount(value: float, unit: str) -> str:
    """A number of a finding with its unit: loss scales as powers of two, counts as whole numbers, shares in percent."""
    if unit == "loss scale":
        return f"loss scale {scale(value)}"
    if unit.startswith("share"):
        return f"{percent(value)}{unit.removeprefix('share')}"
    whole = value == round(value) if abs(value) < 1e6 else False
    if value == 1:
        unit = _SEVERAL.sub(r"\1", unit, count=1)
    return f"{count(value)} {unit}".strip() if whole else number(value, unit)


def sentence(text: object) -> str:
    """A message with a full stop. Its first word is unchanged: it may be an argument's name."""
    words = str(text).strip()
    return words if words.endswith((".", "!", "?")) else f"{words}."


def _missing(value: float | None) -> bool:
    return value is None or value != value
