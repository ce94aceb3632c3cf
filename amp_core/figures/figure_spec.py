"""A figure under construction: plain data, converted to plotly's figure once.

>>> figure = FigureSpec()
>>> figure.add_scatter(x=[0, 1], y=[0.5, 0.25], mode="lines")
>>> figure.xaxis(title="step")
>>> figure.to_figure()

plotly's classes validate each value, which takes ten times as long as everything
else about a figure. So the data is converted at once without validation; the tests validate every figure.
"""

from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from amp_core.figures.colours import with_opacity
from amp_core.figures.shapes import ORNAMENT, compact_array

Values: TypeAlias = "pd.Series[Any] | np.ndarray"


class FigureSpec:
    """Traces and layout in the form of plotly.js; arrays are numpy's or lists."""

    def __init__(self) -> None:
        self.data: list[dict[str, Any]] = []
        self.layout: dict[str, Any] = {}

    @classmethod
    def from_figure(cls, figure: go.Figure) -> "FigureSpec":
        """A spec with the contents of `figure`, which is not changed."""
        spec = cls()
        spec.data = [trace.to_plotly_json() for trace in figure.data]
        spec.layout = figure.layout.to_plotly_json()
        return spec

    def add_scatter(self, **trace: Any) -> None:
        """Add a scatter trace; values of None are left to plotly."""
        self._add("scatter", trace)

    def add_line(self, x: Values, y: Values, line: dict[str, Any], **trace: Any) -> None:
        """Add a line, with points where it has fewer than three."""
        mode = "lines+markers" if len(x) < 3 else "lines"
        marker = {"color": line["color"], "size": 7}
        self.add_scatter(x=compact_array(x), y=compact_array(y), mode=mode, line=line, marker=marker, **trace)

    def add_area(self, x: Values, y: Values, hue: str, stack: str, **trace: Any) -> None:
        """Add an area on top of the earlier ones of the same `stack`."""
        look = {"fillcolor": with_opacity(hue, 0.85), "stackgroup": stack}
        self.add_line(x, y, {"color": hue, "width": 0.8}, **look, **trace)

    def add_bar(self, **trace: Any) -> None:
        """Add horizontal bars."""
        self._add("bar", {"orientation": "h"} | trace)

    def add_labels(self, x: Values, y: list[str], text: list[str], **trace: Any) -> None:
        """Add a text at the right of each point, which is no data by itself."""
        self.add_scatter(
            x=np.asarray(x, dtype=np.float32), y=y, mode="text", text=text, textposition="middle right",
            cliponaxis=False, **{"showlegend": False, "hoverinfo": "skip", "meta": ORNAMENT} | trace,
        )  # fmt: skip

    def add_heatmap(self, **trace: Any) -> None:
        """Add a heatmap trace."""
        self._add("heatmap", trace)

    def add_annotation(self, **annotation: Any) -> None:
        """Add a text in or beside the plot."""
        self.layout.setdefault("annotations", []).append(annotation)

    def add_shape(self, shape: dict[str, Any]) -> None:
        """Add a line or a band; see `style.vertical_line` and `style.horizontal_line`."""
        self.layout.setdefault("shapes", []).append(shape)

    def xaxis(self, **axis: Any) -> None:
        """Set these properties of the x axis."""
        self.layout["xaxis"] = self.layout.get("xaxis", {}) | axis

    def yaxis(self, **axis: Any) -> None:
        """Set these properties of the y axis."""
        self.layout["yaxis"] = self.layout.get("yaxis", {}) | axis

    def categories(self, names: list[str], labels: list[str] | None = None, **axis: Any) -> None:
        """Make the y axis one of names, the first on top; `labels` replace the names on the page."""
        given = {"tickvals": names} | ({} if labels is None else {"ticktext": labels})
        self.yaxis(**{"autorange": "reversed", "type": "category", "showgrid": False} | given | axis)

    def axes(self) -> list[tuple[str, dict[str, Any]]]:
        """Name and settings of each axis."""
        return [(name, axis) for name, axis in self.layout.items() if name.startswith(("xaxis", "yaxis"))]

    def to_figure(self) -> go.Figure:
        """The plotly figure, without a template: colours are set, and the page decides the rest."""
        for _, axis in self.axes():
            if isinstance(axis.get("title"), str):
                axis["title"] = {"text": axis["title"]}
        return go.Figure({"data": self.data, "layout": {"template": {}} | self.layout}, _validate=False)

    def _add(self, kind: str, trace: dict[str, Any]) -> None:
        given = {name: value for name, value in trace.items() if value is not None}
        if any(isinstance(value, pd.Series) for value in given.values()):
            raise TypeError(f"a trace of type {kind!r} was given a Series; give its values as an array or a list")
        self.data.append({"type": kind} | given)
