"""What can a number format hold?"""

import streamlit as st

from amp_core.analysis.format_lab.myths import format_myths
from amp_core.analysis.format_lab.rounding import (
    format_ranges,
    scaling,
    stored_values,
)
from amp_core.figures import format_range_figure
from amp_core.formats import FORMATS
from pages.parts import address, charts, glossary, head, tables, tabs, words
from pages.parts.numbers import blocks, formats, prediction, sums, tensor
from pages.parts.overview import myths

EXAMPLES = ["0.1", "1e-8", "2^-24", "6e-5", "1 + 2^-11", "65504", "70000", "inf"]


def take_example() -> None:
    """Callback of the number examples: put the clicked one into the field."""
    if chosen := st.session_state["lab.example"]:
        st.session_state["lab.number"] = chosen


def one_number() -> None:
    """A number in each format, and what a loss scale does to it."""
    answer = st.container()
    st.session_state.setdefault("lab.number", st.query_params.get("number", "0.1"))
    with st.container(horizontal=True, vertical_alignment="bottom"):
        typed = st.text_input("A number", key="lab.number", max_chars=60, width=240, persist_state="session")
        st.pills("For example", EXAMPLES, key="lab.example", on_change=take_example)
    st.query_params["number"] = typed
    value = formats.typed_number(typed)
    if value is None:
        return
    table = stored_values(value)
    with answer:
        head.headline(formats.headline(typed, table))
    left, ranges = charts.grid("number")
    with left:
        tables.show(formats.table(table), column_config=formats.COLUMNS, alt="The number in each format.")
        with st.expander("Its bits in each format"):
            st.code(formats.bit_rows(table), language=None)

    st.header("With a loss scale, in FP16", anchor=False)
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
    with ranges:
        charts.show(format_range_figure(format_ranges(), marks, dark=charts.dark()), "lab.ranges", half=True)


def format_claims() -> None:
    """Common claims about number formats, and what is right."""
    st.header("Myths about formats", anchor=False)
    table_of_myths = tables.remember(formats.myth_table(format_myths()), "Myths about formats.")
    st.table(table_of_myths, hide_index=True, border="horizontal")


def training_claims() -> None:
    """Common claims about mixed precision, beside the chosen run."""
    st.header("Myths about mixed precision, and what your run shows", anchor=False)
    myths.show()


head.title("Format lab")
tabs.show(
    {
        "Number": one_number,
        "Sums and products": sums.show,
        "Blocks of 8 and 4 bits": blocks.show,
        "Myths about formats": format_claims,
        "Myths about mixed precision": training_claims,
        "Glossary": glossary.show,
    },
    open_for={"sum": "Sums and products", "recipe": "Blocks of 8 and 4 bits"},
)
