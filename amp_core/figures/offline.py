"""Figures outside of the app: in a look of their own, and plotly.js to draw them without a network.

    spec = figure_json(loss_figure(curves, dark=True), dark=True)
    script = plotly_script()

In the app the page's theme gives background, font and grid; in a file of its own nobody does, so they are given here.
"""

import json
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

INK = ("#1B2A2F", "#E3EBE9")
"""Colour of text, light and dark."""
GRID = ("#DDE4E1", "#2B393E")
"""Colour of grid lines, light and dark."""
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"


def figure_json(figure: go.Figure, dark: bool = False) -> dict[str, Any]:
    """`figure` as plain data for `Plotly.newPlot`: keys `data` and `layout`. The figure itself stays as it is."""
    record: dict[str, Any] = json.loads(figure.to_json())
    axis = {
        "gridcolor": GRID[dark],
        "linecolor": GRID[dark],
        "zerolinecolor": GRID[dark],
        "tickcolor": GRID[dark],
        "title": {"standoff": 10},
    }
    record["layout"]["template"] = {
        "layout": {
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"color": INK[dark], "family": FONT, "size": 12},
            "title": {"font": {"size": 15}},
            "xaxis": axis,
            "yaxis": axis,
            "hoverlabel": {"font": {"family": FONT}},
        }
    }
    return {"data": record["data"], "layout": record["layout"]}


def plotly_script() -> str:
    """plotly.js, minified, as the plotly package carries it (about 4.8 MB)."""
    script: str = get_plotlyjs()
    return script
