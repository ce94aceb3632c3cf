"""Episodes of skipped steps as a table, and the way from one to its tensors on Layer detail."""

import pandas as pd
import streamlit as st

from amp_core import Run
from amp_core.analysis.numerics.layers import tensor_names
from pages.parts import loaders, tables, words
from pages.parts.numbers import tensor

COLUMNS = {
    "steps": st.column_config.TextColumn("Steps", pinned=True),
    "skips": tables.count("Skipped in a row", width=110),
    "before": st.column_config.TextColumn("Scale before", width=95),
    "after": st.column_config.TextColumn("Scale after", width=90),
    "origin": st.column_config.TextColumn(
        "Arose in", help="Forward: the loss was not finite already. Backward: it was, and a gradient overflowed."
    ),
    "tensors": st.column_config.TextColumn(
        "Gradients that were not finite", width="large", help="The first in backward stands first"
    ),
}
ALT = "Episodes of skipped steps with scales."


def show(run: Run, episodes: pd.DataFrame) -> None:
    """Draw the table; a selected row offers links to the tensors that were not finite in it."""
    st.header("Skipped steps, one line per episode", anchor=False)
    opening = st.container()
    event = tables.show(
        as_text(episodes),
        column_config=COLUMNS,
        key="loss_scale.episodes",
        on_select="rerun",
        selection_mode="single-row",
        alt=ALT,
    )
    # The table shows text; its downloads hold the numbers.
    tables.remember(episodes.rename(columns={"first": "first_step", "last": "last_step"}), ALT)
    with opening:
        names = _tensors_of(episodes, event["selection"]["rows"])
        for name in [n for n in names if n in loaders.analysed(tensor_names, run, "weight_grad")]:
            row = episodes.iloc[event["selection"]["rows"][0]]
            tensor.link(st.session_state["run"], "weight_grad", name, (int(row["first"]), int(row["last"])))
        if not names:
            st.caption("Click the start of a row to open the tensors of an episode and see them over time.")


def open_step(run: Run, episodes: pd.DataFrame, step: int) -> None:
    """Open Layer detail around a step, on the gradient that was not finite there, if known."""
    names = loaders.analysed(tensor_names, run, "weight_grad")
    here = episodes[(episodes["first"] <= step) & (step <= episodes["last"])]
    culprits = [name for name in _tensors_of(here, [0]) if name in names]
    if culprits or names:
        tensor.jump("weight_grad", (culprits or names)[0], (step, step))


def as_text(episodes: pd.DataFrame) -> pd.DataFrame:
    """The episodes as text."""
    rows = [
        {
            "steps": f"{e.first:,}" if e.first == e.last else f"{e.first:,}–{e.last:,}",
            "skips": e.skips,
            "before": words.scale(e.scale_before),
            "after": words.scale(e.scale_after),
            "origin": e.origin or words.NONE,
            "tensors": e.tensors or words.NONE,
        }
        for e in tables.rows(episodes)
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _tensors_of(episodes: pd.DataFrame, rows: list[int]) -> list[str]:
    """Names of the tensors of the selected episode; empty if none is selected."""
    if not rows or rows[0] >= len(episodes):
        return []
    return str(episodes["tensors"].iloc[rows[0]]).partition(" and ")[0].split(", ")
