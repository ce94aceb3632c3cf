"""Tables and charts on the pages, each to be had as a file.

    tables.show(frame, column_config=COLUMNS,  alt="Memory by category.")

`show` is `st.dataframe` and remembers what it showed, as `charts.show` does of charts; at the end of a page `offer`
puts one button below it: each table as CSV and Parquet, the numbers of each chart as CSV, and what kind of picture a
chart's camera saves. A table is named by its text alternative, a chart by its title.

Shares, counts and measured numbers have a column of one kind on all pages, `share`, `percent`, `count` and `measured`:
the same digits, and the same sign behind them as in the sentences above. Files hold what was computed, shares as 0–1.
"""

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, cast

import pandas as pd
import plotly.graph_objects as go
import streamlit as st
from streamlit.elements.lib.column_types import ColumnConfig

from amp_core.figures.chart_data import chart_csv
from amp_core.text.csv_safe import as_csv, as_parquet, file_name
from amp_core.text.formatting import NONE

_SHOWN = "tables.shown"
_CHARTS = "charts.shown"


_PERCENT = "%.3g %%"
"""Streamlit's own format writes two decimals and no space: 0.01% where a sentence says 0.0123 %."""
_COUNT = "localized"


def share(label: str, *, help_: str | None = None, width: int = 110) -> ColumnConfig:
    """A column of shares 0–1 as bars with their percentage."""
    return st.column_config.ProgressColumn(
        label, help=help_, width=width, format=_PERCENT, min_value=0.0, max_value=100.0
    )


def percent(label: str, *, help_: str | None = None, width: int = 110) -> ColumnConfig:
    """A column of ratios in percent, without bars: they may be above 1 or below 0."""
    return st.column_config.NumberColumn(label, help=help_, width=width, format=_PERCENT)


def count(label: str, *, help_: str | None = None, width: int | None = None, pinned: bool = False) -> ColumnConfig:
    """A column of whole numbers with thousands set apart."""
    return st.column_config.NumberColumn(label, help=help_, width=width, format=_COUNT, pinned=pinned)


def measured(label: str | None = None, *, help_: str | None = None, width: int | None = None) -> ColumnConfig:
    """A column of measured numbers, to three significant digits with thousands set apart."""
    return cast(ColumnConfig, _Measured(st.column_config.NumberColumn(label, help=help_, width=width, format=_COUNT)))


class _Measured(dict[str, Any]):
    """Marks these columns, as distinct from those of counts."""


def rows(frame: pd.DataFrame) -> Iterable[Any]:
    """The rows of `frame`, each with its columns as attributes. Their types are those of the table, which pandas' stubs
    cannot know: they take each for any scalar."""
    return frame.itertuples()


def _as_written(frame: pd.DataFrame, columns: Mapping[str, Any]) -> pd.DataFrame:
    """The frame with shares in percent, and measured numbers rounded as `words.number` does."""
    changed = {}
    for name, column in columns.items():
        kind = dict(column.get("type_config") or {}) if isinstance(column, dict) else {}
        if name in frame and kind.get("format") == _PERCENT:
            changed[name] = 100.0 * frame[name]
        elif name in frame and isinstance(column, _Measured):
            changed[name] = frame[name].map(_rounded, na_action="ignore")
    return frame.assign(**changed)


def _rounded(value: float) -> float:
    """To three significant digits; whole from 100 on."""
    return round(value, max(0, 2 - math.floor(math.log10(abs(value))))) if value and math.isfinite(value) else value


def known(frame: pd.DataFrame, columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of `columns` that have any value in `frame`, so that those get the room; all if it is empty."""
    filled = {name for name in columns if frame.empty or (frame[name].notna() & ~frame[name].isin(["", NONE])).any()}
    return {name: column for name, column in columns.items() if name in filled}


def begin() -> None:
    """Forget the tables of the previous page."""
    st.session_state[_SHOWN] = {}
    st.session_state[_CHARTS] = {}


def remember_chart(key: str, title: str, figure: go.Figure) -> None:
    """Offer the numbers of a chart that was drawn."""
    st.session_state.setdefault(_CHARTS, {})[key] = (title, figure)


def remember(frame: pd.DataFrame, alt: str) -> pd.DataFrame:
    """Offer a table that was drawn without `show`; returns it."""
    st.session_state.setdefault(_SHOWN, {})[alt] = frame
    return frame


def show(frame: pd.DataFrame, *, alt: str, **options: Any) -> Any:
    """Show `frame` without its index and remember it; `options` and the result are those of `st.dataframe`."""
    remember(frame, alt)
    shown = _as_written(frame, options.get("column_config") or {})
    given: dict[str, Any] = {"placeholder": NONE, "hide_index": True} | options
    return st.dataframe(shown, alt=alt, **given)


def offer() -> None:
    """A button that opens the list of the page's tables and charts with their files; nothing if there are none."""
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
                    partial(chart_csv, figure),
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
                        partial(make, frame),
                        f"{file_name(alt)}.{kind.lower()}",
                        key=f"tables.{kind}.{alt}",
                        on_click="ignore",
                    )
