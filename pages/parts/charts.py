"""Put a figure on the page: its width, its toolbar, its colours for the theme in use."""

from typing import Any

import plotly.graph_objects as go
import streamlit as st

CONFIG: dict[str, Any] = {
    "displaylogo": False,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
    "toImageButtonOptions": {"format": "svg"},
}


def dark() -> bool:
    """Whether the reader sees the dark theme. On the first pass of a session the browser has not said yet."""
    return st.context.theme.type == "dark"


def show(figure: go.Figure, key: str, *, clicks: bool = False) -> Any:
    """Draw `figure`; the sentence that it carries for those who cannot see it becomes its text alternative.

    With `clicks` the points that were clicked are given back; see `pages.parts.clicks`.
    """
    alt = figure.layout.meta["alt"]
    if clicks:
        figure.update_layout(clickmode="event+select", dragmode="zoom")
        return st.plotly_chart(figure, key=key, config=CONFIG, alt=alt, on_select="rerun", selection_mode="points")
    return st.plotly_chart(figure, key=key, config=CONFIG, alt=alt)
