"""The look that all figures share.

Background, font and grid are added when a figure goes to a browser (`browser.py`), so a notebook shows its own.
"""

from typing import Any

import plotly.graph_objects as go

from amp_core.figures.figure_spec import FigureSpec
from amp_core.figures.margins import margins

_COUNTED = ("step", "samples seen")
"""Titles of axes that count: 20,000 as in the sentences beside them, where plotly's own format has 20k."""

_FEW = 10
"""Along so few steps plotly would put ticks between them."""


def put(figure: FigureSpec | go.Figure, **layout: Any) -> None:
    """Set these parts of a layout, each as a whole; `update_layout`, which looks into each, takes a hundred times as
    long."""
    for name, value in layout.items():
        figure.layout[name] = value


def finished(figure: FigureSpec, title: str, alt: str, height: int = 360, **layout: Any) -> go.Figure:
    """The look that all figures share: title above, legend below the plot, margins, and `alt` for those who cannot see.

    The legend stands at the figure's own edge: plotly makes room for it there, however many rows a narrow page asks.
    """
    put(
        figure,
        title={
            "text": title, "x": 0, "xref": "container", "xanchor": "left", "y": 1, "yref": "container",
            "yanchor": "top", "pad": {"t": 14, "l": 2},
        },
        legend={
            "orientation": "h", "x": 0, "xref": "container", "xanchor": "left", "y": 0, "yref": "container",
            "yanchor": "bottom", "traceorder": "normal", "title": {"text": ""},
        } | layout.pop("legend", {}),
        margin=margins(figure, {"l": 64, "r": 28, "t": 52, "b": 48} | layout.pop("margin", {}), "showlegend" in layout),
        height=height,
        meta={"alt": alt},
        uirevision=title,
        **layout,
    )  # fmt: skip
    for name, axis in figure.axes():
        axis["automargin"] = True
        if name == "xaxis" and axis.get("title") in _COUNTED:
            axis |= {"exponentformat": "none", "separatethousands": True}
            if axis.get("range") and axis["range"][1] - axis["range"][0] < _FEW:
                axis["dtick"] = 1  # there is no step 550.5
    return figure.made()


def empty(title: str, sentence: str, height: int = 150) -> go.Figure:
    """A figure with nothing to draw: it says why."""
    figure = FigureSpec()
    figure.add_annotation(text=sentence, x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False, font={"size": 14})
    figure.xaxis(visible=False)
    figure.yaxis(visible=False)
    return finished(figure, title, f"{title}: {sentence}", height)
