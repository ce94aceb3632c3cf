"""The look that all figures share.

Background, font and grid are added when a figure goes to a browser (`browser.py`), so a notebook shows its own.
"""

from typing import Any

import plotly.graph_objects as go

from amp_core.figures.figure_spec import FigureSpec
from amp_core.figures.margins import margins
from amp_core.text.formatting import raised

_COUNT_TITLES = ("step", "samples seen")
"""Titles of axes of counts, which are written 20,000 and not 20k as in plotly's own format."""

_MIN_FREE_TICK_STEPS = 10
"""With fewer steps plotly would set ticks between them."""

_TITLE_PX = 40
"""Height of the title, with the legend below it."""


def set_layout(figure: FigureSpec | go.Figure, **layout: Any) -> None:
    """Set these properties of a layout, each as a whole; `update_layout`, which merges, takes a hundred times as
    long."""
    for name, value in layout.items():
        figure.layout[name] = value


def finish(figure: FigureSpec, title: str, alt: str, height: int = 360, **layout: Any) -> go.Figure:
    """Add the common look of all figures: title, legend below it, margins, and `alt`, a text description."""
    set_layout(
        figure,
        title={
            "text": title, "x": 0, "xref": "container", "xanchor": "left", "y": 1, "yref": "container",
            "yanchor": "top", "pad": {"t": 14, "l": 2},
        },
        legend={
            "orientation": "h", "x": 0, "xref": "container", "xanchor": "left", "y": legend_top(height),
            "yref": "container", "yanchor": "top", "traceorder": "normal", "title": {"text": ""},
        },
        margin=margins(figure, {"l": 64, "r": 28, "t": 52, "b": 48} | layout.pop("margin", {}), "showlegend" in layout),
        height=height,
        meta={"alt": raised(alt)},
        uirevision=title,
        **layout,
    )  # fmt: skip
    for name, axis in figure.axes():
        axis["automargin"] = True
        if name == "xaxis" and axis.get("title") in _COUNT_TITLES:
            axis |= {"exponentformat": "none", "separatethousands": True}
            if axis.get("range") and axis["range"][1] - axis["range"][0] < _MIN_FREE_TICK_STEPS:
                axis["dtick"] = 1  # no ticks between steps
    return figure.to_figure()


def legend_top(height: int) -> float:
    """Upper edge of the legend as a share of the figure's height. In units of the container, plotly enlarges the upper
    margin for a legend of several lines, as on a narrow page."""
    return 1 - _TITLE_PX / height


def grow_for_legend(layout: dict[str, Any], px: int) -> None:
    """Make a finished figure higher for `px` more of legend, so that its plot keeps its size."""
    height = layout["height"] + px
    layout["height"], layout["margin"] = height, layout["margin"] | {"t": layout["margin"]["t"] + px}
    layout["legend"] = layout["legend"] | {"y": legend_top(height)}


def empty_figure(title: str, sentence: str) -> go.Figure:
    """A figure without data, with a sentence that says why."""
    figure = FigureSpec()
    figure.add_annotation(text=sentence, x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False, font={"size": 14})
    figure.xaxis(visible=False)
    figure.yaxis(visible=False)
    return finish(figure, title, f"{title}: {sentence}", 150)
