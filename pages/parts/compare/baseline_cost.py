"""The step cost of the baseline compared with this run: which parts shrank and which grew."""

import streamlit as st

from amp_core import Run
from amp_core.views import STEP_COSTS
from pages.parts import baseline, charts, loaders, tables, words

CHANGES = {
    "label": st.column_config.TextColumn("Part", pinned=True),
    "verdict": st.column_config.TextColumn("Verdict"),
    "first_ms": tables.measured("First run (ms)"),
    "ms": tables.measured("This run (ms)"),
    "change_ms": st.column_config.NumberColumn("Change (ms)", format="%+.3g"),
    "change_frac": tables.percent("Of the first run's time", width=150),
}


def show(run: Run) -> None:
    """Both costs as bars and a table of differences; nothing without a baseline or times."""
    other = baseline.run(table="windows")
    if other is None:
        return
    changes = STEP_COSTS.frame([other, run], loaders.analysed)
    if STEP_COSTS.absent(changes):
        return
    st.header("Against the baseline", anchor=False)
    charts.show(STEP_COSTS.figure(changes, charts.dark()), "step_cost.beside.bars")
    own = changes[changes["run"] == changes["run"].iloc[-1]]
    grew = own[own["verdict"].isin(["grew", "new"])].nlargest(3, "change_us")
    shrank = own[own["verdict"].isin(["shrank", "gone"])].nsmallest(3, "change_us")
    lines = [f"{what}: {', '.join(part['label'])}" for what, part in (("Shrank", shrank), ("Grew", grew)) if len(part)]
    times = f"{words.number(own['us'].sum() / 1e3, 'ms')} against {words.number(own['first_us'].sum() / 1e3, 'ms')}"
    profiled = changes["source"].iloc[0] == "profile"
    kernels = "" if profiled else " Phases are shown, because only one run has a profiled window."
    st.markdown(f"{times}. {'. '.join(lines) or 'No part changed by more than 2 % of the step'}.{kernels}")
    shown = own.assign(ms=own["us"] / 1e3, first_ms=own["first_us"] / 1e3, change_ms=own["change_us"] / 1e3)
    alt = "What each part takes in both runs, and the change."
    tables.show(shown, column_config=CHANGES, column_order=list(CHANGES), height="content", alt=alt)
