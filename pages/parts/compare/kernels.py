"""Operators and kernels of two profiled runs side by side."""

from collections.abc import Sequence

import streamlit as st

from amp_core import Run, RunError
from amp_core.analysis.comparison.trace_change import TraceChange, compare_kernels, trace_change
from amp_core.analysis.performance.kernels import window_rows
from amp_core.views import STEP_COSTS
from pages.parts import charts, loaders, tables, words

COLUMNS = {
    "name": st.column_config.TextColumn("Name", pinned=True, width=260),
    "phase": st.column_config.TextColumn("Phase"),
    "verdict": st.column_config.TextColumn("Verdict"),
    "first_ms": tables.measured("First (ms)"),
    "ms": tables.measured("This (ms)"),
    "change_ms": st.column_config.NumberColumn("Change (ms)", format="%+.3g"),
    "ratio": tables.measured("Speed ×"),
    "first_count": tables.measured("Launches, first"),
    "count": tables.measured("Launches"),
    "first_kernel": st.column_config.TextColumn("Longest kernel, first"),
    "kernel": st.column_config.TextColumn("Longest kernel"),
}


def traces(runs: Sequence[Run]) -> None:
    """The page for traces alone: what each bought against the first, parts of the step, operators and kernels."""
    for run in runs[1:]:
        try:
            change: TraceChange = loaders.analysed(trace_change, [runs[0], run])
        except RunError as error:
            st.info(words.escape(words.sentence(error)))
            continue
        first, *rest = change.sentences
        st.markdown(f"## {words.escape(first)}")
        st.markdown(words.escape(" ".join(rest)))
        st.caption(" ".join(change.notes)) if change.notes else None
    costs = STEP_COSTS.frame(list(runs), loaders.analysed)
    if not STEP_COSTS.absent(costs):
        charts.show(STEP_COSTS.figure(costs, charts.dark()), "compare.steps")
    changes(runs)


def profiled(runs: Sequence[Run]) -> bool:
    """Whether the first and the last run have a profiled window."""
    return not any(loaders.analysed(window_rows, run).empty for run in (runs[0], runs[-1]))


def changes(runs: Sequence[Run]) -> None:
    """What became faster or slower, appeared or vanished, from the first run to the last; nothing unless both have a
    profiled window."""
    if not profiled(runs):
        return
    st.header("Operators and kernels", anchor=False)
    by = st.segmented_control(
        "Grouped by", ["op", "kernel"], default="op", required=True, format_func=NAMES.__getitem__, key="compare.by"
    )
    table = loaders.analysed(compare_kernels, [runs[0], runs[-1]], by)
    shown = table.assign(
        ms=table["us"] / 1e3, first_ms=table["first_us"] / 1e3, change_ms=table["change_us"] / 1e3
    ).replace("", words.NONE)
    columns = {
        name: column for name, column in COLUMNS.items() if name in shown and (by == "op" or "kernel" not in name)
    }
    st.caption(f"From {words.escape(runs[0].name)} to {words.escape(runs[-1].name)}, the largest change first.")
    tables.show(shown, column_config=columns, column_order=list(columns), alt="Changes of operators and kernels.")


NAMES = {"op": "Operator", "kernel": "Kernel"}
