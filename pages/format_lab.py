"""What can a number format hold?"""

import streamlit as st

from amp_core import RunError
from amp_core.analysis.format_lab.myths import format_myths
from amp_core.analysis.format_lab.rounding import (
    MAX_ADDENDS,
    Number,
    accumulated,
    element_formats,
    format_ranges,
    parse_number,
    rounded_operation,
    scaling,
    stored_values,
)
from amp_core.figures import accumulation_figure, format_range_figure
from amp_core.formats import FORMATS
from pages.parts import address, charts, glossary, head, tables, words
from pages.parts.numbers import formats, prediction, tensor
from pages.parts.overview import myths

EXAMPLES = ["0.1", "1e-8", "2^-24", "6e-5", "1 + 2^-11", "65504", "70000", "inf"]
SUMS = {
    "1 + 2⁻¹¹ in FP16": ("fp16", "1", "+", "2^-11"),
    "2048 + 1 in FP16": ("fp16", "2048", "+", "1"),
    "256 + 1 in BF16": ("bf16", "256", "+", "1"),
    "An update in BF16: w = 0.5, Δw = 0.001": ("bf16", "0.5", "+", "0.001"),
    "2⁻¹³ × 2⁻¹³ in FP16": ("fp16", "2^-13", "×", "2^-13"),
    "300 × 300 in FP16": ("fp16", "300", "×", "300"),
}
ELEMENTS = [form.name for form in element_formats()]
FIELDS = ("format", "a", "operation", "b")  # the operands of a sum or product


def number(label: str, text: str) -> Number:
    """The number that was typed; ends the page with a sentence if the text is not a number."""
    try:
        return parse_number(text)
    except RunError as error:
        st.error(words.escape(words.sentence(error)))
        st.caption(f"Nothing is computed until “{label}” is a number again.")
        st.stop()


def take_example() -> None:
    """Callback of the number examples: put the clicked one into the field."""
    if chosen := st.session_state["lab.example"]:
        st.session_state["lab.number"] = chosen


def take_sum() -> None:
    """Callback of the examples of sums and products."""
    if chosen := st.session_state["lab.sum"]:
        for field, value in zip(FIELDS, SUMS[chosen], strict=True):
            st.session_state[f"lab.{field}"] = value


def linked_sum(text: str) -> tuple[str, ...] | None:
    """`bf16,256,+,1` from the address; None if it is not a sum or product in a known format."""
    parts = tuple(text.split(","))
    return parts if len(parts) == len(FIELDS) and parts[0] in ELEMENTS and parts[2] in ("+", "×") else None


head.title("Format lab")
answer = st.container()
st.session_state.setdefault("lab.number", st.query_params.get("number", "0.1"))
with st.container(horizontal=True, vertical_alignment="bottom"):
    typed = st.text_input("A number", key="lab.number", max_chars=60, width=240, persist_state="session")
    st.pills("For example", EXAMPLES, key="lab.example", on_change=take_example)
st.query_params["number"] = typed
value = number("A number", typed)
table = stored_values(value)
with answer:
    head.headline(formats.headline(typed, table))
st.code(formats.bit_rows(table), language=None)
tables.show(formats.table(table), column_config=formats.COLUMNS, hide_index=True, alt="The number in each format.")

st.header("What a loss scale does to it in FP16", anchor=False)
address.take("scale", "lab.scale", prediction.power_in_range, 16)
low, high = prediction.LOWEST, prediction.HIGHEST
power = st.select_slider("Loss scale", range(low, high + 1), format_func=tensor.power_of_two, key="lab.scale")
address.keep("scale", "lab.scale", str(power) if power != 16 else "")
trip = scaling(value, power, FORMATS["fp16"])
st.markdown(formats.trip_headline(trip))
trips = tables.remember(formats.trip(trip, power), "What a loss scale does to the number in FP16.")
st.table(trips, hide_index=True, border="horizontal", width="content")
marks = [
    mark
    for mark in (
        formats.mark(words.raised(typed), value),
        formats.mark(f"times {words.scale(2.0**power)}", trip.scaled),
    )
    if mark
]
charts.show(format_range_figure(format_ranges(), marks, dark=charts.dark()), "lab.ranges")

st.header("Sums and products that round away", anchor=False)
st.pills("For example", list(SUMS), key="lab.sum", on_change=take_sum)
address.take("sum", "lab.linked", linked_sum)
linked = st.session_state.pop("lab.linked", None)
for field, at_first in zip(FIELDS, linked or next(iter(SUMS.values())), strict=True):
    if linked or f"lab.{field}" not in st.session_state:
        st.session_state[f"lab.{field}"] = at_first
with st.container(horizontal=True):
    form = FORMATS[
        st.selectbox("Format", ELEMENTS, key="lab.format", format_func=lambda f: FORMATS[f].label, width=160)
    ]
    a = number("a", st.text_input("a", key="lab.a", max_chars=60, width=140))
    sign = st.segmented_control("Operation", ["+", "×"], key="lab.operation", required=True)
    b = number("b", st.text_input("b", key="lab.b", max_chars=60, width=140))
    shown = tuple(st.session_state[f"lab.{field}"] for field in FIELDS)
    address.keep("sum", "lab.linked", ",".join(shown) if shown != next(iter(SUMS.values())) else "")
    many = st.number_input("Times to add b", 1, MAX_ADDENDS, 3000, key="lab.count", width=180)
st.markdown(formats.operation(rounded_operation(a, b, sign, form), sign, form.label))
sums = accumulated(a, b, int(many), form)
title = words.raised(f"{st.session_state['lab.b']} added to {st.session_state['lab.a']} again and again")
charts.show(accumulation_figure(sums, form.label, charts.dark(), title), "lab.sums")

st.header("Myths about formats", anchor=False)
table_of_myths = tables.remember(formats.myth_table(format_myths()), "Myths about formats.")
st.table(table_of_myths, hide_index=True, border="horizontal")

st.header("Myths about mixed precision, and what your run shows", anchor=False)
myths.show()

st.header("Terms, and where your own run shows them", anchor=False)
glossary.show()
