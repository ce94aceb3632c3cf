"""Tables and charts on the pages, each to be had as a file.

    tables.show(frame, column_config=COLUMNS, hide_index=True, alt="Memory by category.")

`show` is `st.dataframe` and remembers what it showed, as `charts.show` does of charts; at the end of a page `offer`
puts one button below it: each table as CSV and Parquet, the numbers of each chart as CSV, and what kind of picture a
chart's camera saves. A table is named by its text alternative, a chart by its title.
"""

from typing import Any

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from amp_core.figures.data import chart_csv
from amp_core.spreadsheet import as_csv, as_parquet, file_name
from amp_core.words import NONE

_SHOWN = "tables.shown"
_CHARTS = "charts.shown"


def begin() -> None:
    """Forget the tables of the page before."""
    st.session_state[_SHOWN] = {}
    st.session_state[_CHARTS] = {}


def remember_chart(key: str, title: str, figure: go.Figure) -> None:
    """A chart was drawn: its numbers are offered."""
    st.session_state.setdefault(_CHARTS, {})[key] = (title, figure)


def remember(frame: pd.DataFrame, alt: str) -> pd.DataFrame:
    """A table is drawn otherwise than by `show`: it is offered too."""
    st.session_state.setdefault(_SHOWN, {})[alt] = frame
    return frame


def show(frame: pd.DataFrame, *, alt: str, **options: Any) -> Any:
    """Show `frame` and remember it; `options` are those of `st.dataframe`, whose answer is given back."""
    remember(frame, alt)
    return st.dataframe(frame, alt=alt, **({"placeholder": NONE} | options))


def offer() -> None:
    """A button that opens the list of the page's tables and charts with their files; nothing where there is neither."""
    shown: dict[str, pd.DataFrame] = st.session_state.get(_SHOWN, {})
    drawn: dict[str, tuple[str, go.Figure]] = st.session_state.get(_CHARTS, {})
    if not shown and not drawn:
        return
    with st.popover("Data", icon=":material/table:", help="What this page shows, as files"):
        for key, (title, figure) in drawn.items():
            with st.container(horizontal=True, vertical_alignment="center"):
                st.markdown(title, width="stretch")
                st.download_button(
                    "CSV",
                    lambda figure=figure: chart_csv(figure),
                    f"{file_name(title)}.csv",
                    key=f"charts.csv.{key}",
                    on_click="ignore",
                )
        if drawn:
            st.segmented_control(
                "A chart's camera saves",
                ["svg", "png"],
                default="svg",
                required=True,
                format_func=str.upper,
                key="charts.picture",
                persist_state="session",
            )
        for alt, frame in shown.items():
            with st.container(horizontal=True, vertical_alignment="center"):
                st.markdown(alt.rstrip("."), width="stretch")
                for kind, make in (("CSV", as_csv), ("Parquet", as_parquet)):
                    st.download_button(
                        kind,
                        lambda make=make, frame=frame: make(frame),
                        f"{file_name(alt)}.{kind.lower()}",
                        key=f"tables.{kind}.{alt}",
                        on_click="ignore",
                    )
