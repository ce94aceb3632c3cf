"""The step cost of the baseline compared with this run: which parts shrank and which grew."""

import pandas as pd
import streamlit as st

from amp_core import Run
from amp_core.views import STEP_COSTS
from pages.parts import baseline, loaders, tables, words

CHANGES = {
    "label": st.column_config.TextColumn("Part", pinned=True),
    "verdict": st.column_config.TextColumn("Verdict"),
    "first_ms": tables.measured("Baseline (ms)"),
    "ms": tables.measured("This run (ms)"),
    "frac": tables.share("Of this run's step"),
    "change_ms": st.column_config.NumberColumn("Change (ms)", format="%+.3g"),
    "change_frac": tables.percent("Of the baseline's step", width=150),
}


def changes(run: Run) -> pd.DataFrame | None:
    """The costs of the baseline and of this run, with the changes; None without a baseline or times."""
    other = baseline.run(table="windows")
    if other is None:
        return None
    both = STEP_COSTS.frame([other, run], loaders.analysed)
    return None if STEP_COSTS.absent(both) else both


def show(changes: pd.DataFrame) -> None:
    """What each part takes in both runs, in words and as a table."""
    own = changes[changes["run"] == changes["run"].iloc[-1]]
    grew = own[own["verdict"].isin(["grew", "new"])].nlargest(3, "change_us")
    shrank = own[own["verdict"].isin(["shrank", "gone"])].nsmallest(3, "change_us")
    lines = [f"{what}: {', '.join(part['label'])}" for what, part in (("Shrank", shrank), ("Grew", grew)) if len(part)]
    times = f"{words.number(own['us'].sum() / 1e3, 'ms')} against {words.number(own['first_us'].sum() / 1e3, 'ms')} of "
    times += words.escape(changes["run"].iloc[0])
    profiled = changes["source"].iloc[0] == "profile"
    kernels = "" if profiled else " Phases are shown, because only one run has a profiled window."
    st.markdown(f"{times}. {'. '.join(lines) or 'No part changed by more than 2 % of the step'}.{kernels}")
    shown = own.assign(
        ms=own["us"] / 1e3,
        frac=own["us"] / own["us"].sum(),
        first_ms=own["first_us"] / 1e3,
        change_ms=own["change_us"] / 1e3,
    )
    alt = "What each part takes in both runs, and the change."
    tables.show(shown, column_config=CHANGES, column_order=list(CHANGES), height="content", alt=alt)
