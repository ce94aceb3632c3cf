"""Draw a figure on the page: its width, toolbar, and colours for the current theme."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from amp_core import Run
from amp_core.figures.browser import for_browser
from amp_core.figures.margins import PAGE_PX, legend_px
from amp_core.figures.style import grow_for_legend
from amp_core.text.csv_safe import file_name
from amp_core.views import View
from pages.parts import loaders, tables

SYNC = Path(__file__).with_name("chart_sync.js").read_text(encoding="utf-8")
"""Crosshair and zoom of one chart over steps in all others on the page."""
_REMOVED = ["select2d", "lasso2d", "autoScale2d"]


def begin() -> None:
    """Before a page: let its charts over steps share crosshair and zoom."""
    st.html(f"<script>{SYNC}</script>", unsafe_allow_javascript=True)


def grid(key: str) -> list[DeltaGenerator]:
    """Two containers for charts: side by side, or one below the other on a narrow page."""
    row = st.container(horizontal=True, key=f"grid-{key}")
    return [row.container(), row.container()]


def config(title: str) -> dict[str, Any]:
    """Plotly's settings: the camera button saves the chart under its title, in the format chosen in `Data`."""
    picture = {
        "format": st.session_state.get("charts.picture") or "svg",
        "filename": file_name(title),
        "scale": 2,
    }
    return {"displaylogo": False, "modeBarButtonsToRemove": _REMOVED, "toImageButtonOptions": picture}


def dark() -> bool:
    """Whether the theme is dark. On the first pass of a session the browser has not reported it yet."""
    return st.context.theme.type == "dark"


def view(shown: View[Any], of: Run | Sequence[Run], key: str, *, half: bool = False, **options: Any) -> None:
    """Draw a view of `amp_core.views` with cached analyses; `options` are those of `View.frame`."""
    show(shown.draw(of, dark(), loaders.analysed, **options), key, half=half)


def show(figure: go.Figure, key: str, *, clicks: bool = False, half: bool = False) -> Any:
    """Draw `figure`; the description that it carries becomes its text alternative.

    The room for the legend is that of a chart across the page, with `half` of one in a column of `grid`. With `clicks`,
    return the clicked points; see `pages.parts.clicks`.
    """
    alt, title = figure.layout.meta["alt"], figure.layout.title.text
    tables.remember_chart(key, title, figure)
    record = for_browser(figure, dark())
    always = record["layout"].get("showlegend") is True
    if not half:  # what `finish` reserved is for a column
        less = legend_px(record["data"], always, PAGE_PX) - legend_px(record["data"], always)
        grow_for_legend(record["layout"], less)
    # Streamlit identifies a chart by its content
    record["layout"]["datarevision"] = 0
    options: dict[str, Any] = {}
    if clicks:
        record["layout"] |= {"clickmode": "event+select", "dragmode": "zoom"}
        options = {"on_select": "rerun", "selection_mode": "points"}
    return st.plotly_chart(_SerializedFigure(record), theme=None, key=key, config=config(title), alt=alt, **options)


class _SerializedFigure(go.Figure):  # type: ignore[misc]  # plotly has no types
    """A figure in its serialized form, which plotly does not validate again."""

    def __init__(self, record: dict[str, Any]) -> None:
        super().__init__({"layout": {"template": {}}}, _validate=False)
        self._record = record

    def to_dict(self) -> dict[str, Any]:
        return self._record
