"""Put a figure on the page: its width, its toolbar, its colours for the theme in use."""

from typing import Any

import plotly.graph_objects as go
import streamlit as st

from amp_core.figures.style import put
from pages.parts import tables

_REMOVED = ["select2d", "lasso2d", "autoScale2d"]


def config(title: str) -> dict[str, Any]:
    """Plotly's settings: the camera saves a chart under its title, as the picture that was chosen in `Data`."""
    picture = {
        "format": st.session_state.get("charts.picture") or "svg",
        "filename": tables.file_name(title),
        "scale": 2,
    }
    return {"displaylogo": False, "modeBarButtonsToRemove": _REMOVED, "toImageButtonOptions": picture}


def dark() -> bool:
    """Whether the reader sees the dark theme. On the first pass of a session the browser has not said yet."""
    return st.context.theme.type == "dark"


def show(figure: go.Figure, key: str, *, clicks: bool = False) -> Any:
    """Draw `figure`; the sentence that it carries for those who cannot see it becomes its text alternative.

    With `clicks` the points that were clicked are given back; see `pages.parts.clicks`.
    """
    alt, title = figure.layout.meta["alt"], figure.layout.title.text
    tables.remember_chart(key, title, figure)
    if clicks:
        put(figure, clickmode="event+select", dragmode="zoom")
        options = {"on_select": "rerun", "selection_mode": "points"}
        return st.plotly_chart(figure, key=key, config=config(title), alt=alt, **options)
    return st.plotly_chart(figure, key=key, config=config(title), alt=alt)
