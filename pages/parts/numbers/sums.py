"""A sum or product in one format: what is rounded away, once and again and again."""

import streamlit as st

from amp_core.analysis.format_lab.rounding import MAX_ADDENDS, accumulated, element_formats, rounded_operation
from amp_core.figures import accumulation_figure
from amp_core.formats import FORMATS
from pages.parts import address, charts, words
from pages.parts.choice import one_of
from pages.parts.numbers import formats

SUMS = {
    "1 + 2⁻¹¹ in FP16": ("fp16", "1", "+", "2^-11"),
    "2048 + 1 in FP16": ("fp16", "2048", "+", "1"),
    "256 + 1 in BF16": ("bf16", "256", "+", "1"),
    "An update in BF16: w = 0.5, Δw = 0.001": ("bf16", "0.5", "+", "0.001"),
    "2⁻¹³ × 2⁻¹³ in FP16": ("fp16", "2^-13", "×", "2^-13"),
    "300 × 300 in FP16": ("fp16", "300", "×", "300"),
}
FIELDS = ("format", "a", "operation", "b")  # the operands of a sum or product


def show() -> None:
    """Draw the operands, their result, and the running sum."""
    st.header("Operands that round away", anchor=False)
    st.pills("For example", list(SUMS), key="lab.sum", on_change=_take_sum)
    address.take("sum", "lab.linked", _linked_sum)
    linked = st.session_state.pop("lab.linked", None)
    for field, at_first in zip(FIELDS, linked or next(iter(SUMS.values())), strict=True):
        if linked or f"lab.{field}" not in st.session_state:
            st.session_state[f"lab.{field}"] = at_first
    names = [form.name for form in element_formats()]
    with st.container(horizontal=True):
        form = FORMATS[
            st.selectbox(
                "Format",
                names,
                key="lab.format",
                format_func=lambda f: FORMATS[f].label,
                width=160,
                persist_state="session",
            )
        ]
        a = formats.typed_number(st.text_input("a", key="lab.a", max_chars=60, width=140, persist_state="session"))
        sign = one_of("Operation", ["+", "×"], "lab.operation", persist_state="session")
        b = formats.typed_number(st.text_input("b", key="lab.b", max_chars=60, width=140, persist_state="session"))
        shown = tuple(st.session_state[f"lab.{field}"] for field in FIELDS)
        address.keep("sum", "lab.linked", ",".join(shown) if shown != next(iter(SUMS.values())) else "")
        many = st.number_input(
            "Times to add b", 1, MAX_ADDENDS, 3000, key="lab.count", width=180, persist_state="session"
        )
    if a is None or b is None:
        return
    st.markdown(formats.operation(rounded_operation(a, b, sign, form), sign, form.label))
    sums = accumulated(a, b, int(many), form)
    title = words.raised(f"{st.session_state['lab.b']} added to {st.session_state['lab.a']} again and again")
    charts.show(accumulation_figure(sums, form.label, charts.dark(), title), "lab.sums")


def _take_sum() -> None:
    """Callback of the examples of sums and products."""
    if chosen := st.session_state["lab.sum"]:
        for field, value in zip(FIELDS, SUMS[chosen], strict=True):
            st.session_state[f"lab.{field}"] = value


def _linked_sum(text: str) -> tuple[str, ...] | None:
    """`bf16,256,+,1` from the address; None if it is not a sum or product in a known format."""
    parts = tuple(text.split(","))
    names = {form.name for form in element_formats()}
    return parts if len(parts) == len(FIELDS) and parts[0] in names and parts[2] in ("+", "×") else None
