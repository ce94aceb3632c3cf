"""A number in the formats as text: bits, values with their errors, and the effect of rounding."""

import math
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction

import pandas as pd
import streamlit as st

from amp_core import RunError
from amp_core.analysis.format_lab.myths import FormatMyth
from amp_core.analysis.format_lab.rounding import Number, Operation, Scaling, parse_number
from pages.parts import tables, words

KINDS = {
    "zero": "zero",
    "underflow": "underflow: becomes 0",
    "subnormal": "subnormal",
    "normal": "normal",
    "overflow": "overflow",
    "inf": "infinite",
    "nan": "NaN",
}
COLUMNS = {
    "Format": st.column_config.TextColumn(pinned=True, width="small"),
    "Absolute error": st.column_config.TextColumn(alignment="right"),
    "Relative error": st.column_config.TextColumn(alignment="right", help="Error over the number itself"),
}
NEARLY = "nearly 0"
"""An error below the range of the float64 that holds it."""
VERDICTS = {"true": ":green-badge[true]", "imprecise": ":orange-badge[imprecise]", "false": ":red-badge[false]"}


def typed_number(text: str) -> Number | None:
    """The number that was typed; None, with a sentence on the page, if the text is not a number."""
    try:
        return parse_number(text)
    except RunError as error:
        st.error(words.escape(words.sentence(error)))
        return None


def headline(typed: str, table: pd.DataFrame) -> str:
    """Which formats hold the number exactly, and in which it is lost."""
    number = words.escape(typed.strip())
    finite = table[~table["kind"].isin(["inf", "nan"])]
    if finite.empty or (table["kind"].isin(["inf", "nan"]).any() and (table["kind"] != "normal").all()):
        which = labels(table, table["kind"].isin(["inf", "nan"]))
        rest = labels(table, table["kind"] == "overflow")
        beside = f"; {rest} has no infinity and takes its largest value" if rest else ""
        return f"{number} is representable in {which}{beside}."
    parts = []
    exact = table["exact"]
    parts.append(
        f"is exactly representable in {labels(table, exact)}"
        if exact.any()
        else "is not exactly representable in any of these formats"
    )
    for kind, text in (
        ("underflow", "becomes 0 in"),
        ("subnormal", "is subnormal in"),
        ("overflow", "is too large for"),
    ):
        if (table["kind"] == kind).any():
            parts.append(f"{text} {labels(table, table['kind'] == kind)}")
    half = table.loc[table["format"] == "fp16"].iloc[0]
    off = (
        f" FP16 stores it with a relative error of {words.percent(half['rel_error'])}."
        if 0 < half["rel_error"] < 1
        else ""
    )
    return f"{number} {'; it '.join(parts)}.{off}"


def labels(table: pd.DataFrame, where: "pd.Series[bool]") -> str:
    """The formats of those rows as text."""
    return ", ".join(table.loc[where, "label"])


def bit_rows(table: pd.DataFrame) -> str:
    """Sign, exponent and mantissa of each format, one line per format with the fields aligned."""
    widest = max(map(len, table["exponent"]))
    lines = [f"{'':<10} {'±':<3} {'exponent':>{widest}}  mantissa"]
    lines += [f"{r.label:<10} {r.sign:<3} {r.exponent:>{widest}}  {r.mantissa}" for r in tables.rows(table)]
    return "\n".join(lines)


def table(result: pd.DataFrame) -> pd.DataFrame:
    """Stored value, errors and neighbours as text."""
    rows = list(tables.rows(result))
    return pd.DataFrame(
        {
            "Format": result["label"],
            "Class": [KINDS[k] for k in result["kind"]],
            "Stored value": [words.exactly(v) for v in result["value"]],
            "Relative error": [
                NEARLY if r.rel_error == 0 and not r.exact else words.percent(r.rel_error) for r in rows
            ],
            "Absolute error": [NEARLY if r.abs_error == 0 and not r.exact else words.number(r.abs_error) for r in rows],
            "Next below": [words.exactly(v) for v in result["below"]],
            "Next above": [words.exactly(v) for v in result["above"]],
        }
    )


def trip(result: Scaling, power: int) -> pd.DataFrame:
    """The stages of a gradient that is scaled, rounded and unscaled."""
    scale = words.scale(2.0**power)
    rows = [
        (
            "Unscaled, in FP16",
            words.number(result.plain, digits=5),
            f"{KINDS[result.plain_kind]}, {error(result.plain_rel_error)}",
        ),
        (f"Times {scale}", written(result.scaled), "exact"),
        ("Rounded to FP16", words.number(result.stored, digits=5), KINDS[result.stored_kind]),
        (f"Divided by {scale} in FP32", words.number(result.unscaled, digits=5), error(result.rel_error)),
    ]
    return pd.DataFrame(rows, columns=["Stage", "Value", "Result"])


def trip_headline(result: Scaling) -> str:
    """Whether the scale helps this number."""
    if math.isinf(result.stored):
        return "Scaled, it **overflows**: the step would be skipped and the scale halved."
    if not result.plain_rel_error > 0:
        return "It needs no scale: FP16 represents it exactly."
    if result.rel_error < result.plain_rel_error:
        return "The scale **helps**: more of the number comes back after unscaling than FP16 keeps without it."
    if result.rel_error > result.plain_rel_error:
        return "The scale **hurts**: less of the number comes back than without it."
    return "The scale **makes no difference**: multiplying by a power of two changes only the exponent."


def error(value: float) -> str:
    """A relative error as text."""
    return (
        "not defined"
        if value != value
        else "exact"
        if value == 0
        else "lost"
        if math.isinf(value)
        else f"error {words.percent(value)}"
    )


def mark(label: str, number: Number) -> tuple[str, float] | None:
    """A position on the axis of magnitudes; None for a number without one."""
    if number == 0 or not isinstance(number, Fraction):
        return None
    return label, math.log2(abs(number.numerator)) - math.log2(number.denominator)


def written(number: Number, exactly: bool = False) -> str:
    """A number as text, to five digits or exactly as float64; also beyond the range of float64."""
    if isinstance(number, Fraction) and number != 0:
        power = abs(number.numerator).bit_length() - number.denominator.bit_length()
        if not -1070 < power < 1023:
            mantissa, _, exponent = f"{Decimal(number.numerator) / number.denominator:.4e}".partition("e")
            return words.raised(f"{mantissa} × 10^{int(exponent)}").replace("-", "−")
    return words.exactly(float(number)) if exactly else words.number(float(number), digits=5)


def operation(result: Operation, sign: str, label: str) -> str:
    """One sum or product, and the effect of rounding."""
    exact = written(result.exact, exactly=True)
    text = f"{words.exactly(result.a)} {sign} {words.exactly(result.b)} = {exact}; {label} keeps "
    text = words.escape(f"{text}{words.exactly(result.stored)}")
    if result.without_effect:
        return f"{text}: the second number **rounds away**, as if it had not been added."
    if result.kind in ("underflow", "overflow"):
        return f"{text}: **{result.kind}**."
    return f"{text}: rounded." if result.changed else f"{text}: exact."


def myth_table(myths: Sequence[FormatMyth]) -> pd.DataFrame:
    """The myths as a table."""
    return pd.DataFrame(
        {
            "Said": [words.escape(words.raised(c.claim)) for c in myths],
            "Verdict": [VERDICTS[c.rating] for c in myths],
            "Precisely": [words.escape(words.raised(c.correction)) for c in myths],
        }
    )
