"""What does one recipe buy against another, and what does it cost?"""

import streamlit as st

from amp_core import Run, RunError
from amp_core.analysis import compare, loss_curves
from amp_core.figures import compare_bars, loss_figure
from pages.parts import charts, comparison, empty, head, loaders, picker, report, words
from pages.parts.library import Entry

MOST = 8
X_LABELS = {"step": "Step", "samples": "Samples", "time_s": "Time"}


def pick() -> list[Entry]:
    """The chosen runs, the reference first; kept in the address."""
    entries: dict[str, Entry] = st.session_state["entries"]
    readable = [key for key, entry in entries.items() if entry.readable]
    if not readable:
        empty.no_runs()
    asked = [key for key in st.query_params.get_all("with") if key in readable]
    if asked and asked != st.session_state.get("compare.address"):  # a link, or the browser's Back
        st.session_state["compare.runs"] = asked[:MOST]
    elif "compare.runs" not in st.session_state:
        st.session_state["compare.runs"] = suggested(entries, readable)
    st.session_state["compare.runs"] = [key for key in st.session_state["compare.runs"] if key in readable]
    keys = st.multiselect(
        "Runs, the reference first",
        readable,
        key="compare.runs",
        format_func=lambda key: picker.label(entries[key]),
        max_selections=MOST,
        placeholder="Choose two runs or more",
        persist_state="session",
    )
    st.query_params["with"] = st.session_state["compare.address"] = keys
    return [entries[key] for key in keys]


def suggested(entries: dict[str, Entry], readable: list[str]) -> list[str]:
    """The chosen run and those of the same place that train the same workload at the same size, FP32 first."""

    def task(key: str) -> tuple[object, ...]:
        config = entries[key].config or {}
        return (entries[key].origin, config.get("workload"), config.get("size"))

    chosen = st.session_state["run"]
    ended = [key for key in readable if not entries[key].under_way]
    keys = [key for key in ended if task(key) == task(chosen)] if chosen in readable else ended[:1]
    keys.sort(key=lambda key: ((entries[key].config or {}).get("precision") != "fp32", key != chosen))
    return keys[:5]


def opened(entries: list[Entry]) -> list[Run]:
    """The runs that can be read and have steps; a sentence for each of the others."""
    runs = []
    for entry in entries:
        try:
            run = loaders.open_run(entry)
            if run.steps.empty:
                st.info(f"{words.escape(entry.name)} has no steps and is left out.")
            else:
                runs.append(run)
        except RunError as error:
            st.error(f"{words.escape(entry.name)} is left out: {words.escape(words.sentence(error))}")
    return runs


head.title("Compare")
runs = opened(pick())
if len(runs) < 2:
    empty.nothing("Choose two runs or more: the first is the reference that the others are set beside.")

found = loaders.analysed(compare, runs)
st.markdown(comparison.verdict(found))
if len(found.differences):
    with st.expander(
        f"What differs: {comparison.some(found.differences['setting'])}", expanded=len(found.differences) <= 5
    ):
        st.dataframe(found.differences.rename(columns={"setting": "Setting"}), hide_index=True, alt="Settings.")
st.dataframe(
    comparison.table(found.table),
    column_config=comparison.NUMBERS,
    hide_index=True,
    alt="One row per run, beside the first.",
)
for note in found.notes:
    st.caption(words.escape(note))
with st.container(horizontal=True, vertical_alignment="center"):
    x = st.segmented_control(
        "Loss by", list(X_LABELS), default="step", required=True, format_func=X_LABELS.__getitem__, key="compare.x"
    )
    log = st.toggle("Log loss axis", key="compare.log")
dark = charts.dark()
curves = loaders.analysed(loss_curves, runs, x, most=2000)
charts.show(loss_figure(curves, dark=dark, log=log), "compare.loss")
row = st.container(horizontal=True)  # wraps: bars with names beside them want their width
for column in ("speed_ratio", "memory_ratio", "loss_ratio"):
    with row.container(width=300):
        charts.show(compare_bars(found.table, column, dark=dark), f"compare.{column}")
report.button(runs, "compare")
