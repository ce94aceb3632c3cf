"""A figure while it is drawn: plain data, of which plotly's own is made once.

>>> figure = Sketch()
>>> figure.add_scatter(x=[0, 1], y=[0.5, 0.25], mode="lines")
>>> figure.xaxis(title="step")
>>> figure.made()

plotly's classes look at each value that they are given, one call at a time, which takes ten times as long as everything
else about a figure. So they are given all of it at once and do not look; the tests have them look at every figure.
"""

from typing import Any

import pandas as pd
import plotly.graph_objects as go


class FigureSpec:
    """Traces and layout as plotly.js takes them; arrays as numpy's or lists."""

    def __init__(self) -> None:
        self.data: list[dict[str, Any]] = []
        self.layout: dict[str, Any] = {}

    @classmethod
    def of(cls, figure: go.Figure) -> "FigureSpec":
        """One that begins with all that is in `figure`, which stays as it is."""
        sketch = cls()
        sketch.data = [trace.to_plotly_json() for trace in figure.data]
        sketch.layout = figure.layout.to_plotly_json()
        return sketch

    def add_scatter(self, **trace: Any) -> None:
        """Add a trace of that type; what is None is left to plotly."""
        self._add("scatter", trace)

    def add_bar(self, **trace: Any) -> None:
        """The same for bars."""
        self._add("bar", trace)

    def add_heatmap(self, **trace: Any) -> None:
        """The same for a heatmap."""
        self._add("heatmap", trace)

    def add_annotation(self, **annotation: Any) -> None:
        """Add a text in or beside the plot."""
        self.layout.setdefault("annotations", []).append(annotation)

    def add_shape(self, shape: dict[str, Any]) -> None:
        """Add a line or a band; see `style.upright` and `style.level`."""
        self.layout.setdefault("shapes", []).append(shape)

    def xaxis(self, **axis: Any) -> None:
        """Set these parts of the axis along the bottom, and leave the others."""
        self.layout["xaxis"] = self.layout.get("xaxis", {}) | axis

    def yaxis(self, **axis: Any) -> None:
        """The same for the axis on the left."""
        self.layout["yaxis"] = self.layout.get("yaxis", {}) | axis

    def axes(self) -> list[tuple[str, dict[str, Any]]]:
        """Name and settings of each axis."""
        return [(name, axis) for name, axis in self.layout.items() if name.startswith(("xaxis", "yaxis"))]

    def made(self) -> go.Figure:
        """The same as plotly's own, without its template: colours are given, and the rest is the page's to choose."""
        for _, axis in self.axes():
            if isinstance(axis.get("title"), str):
                axis["title"] = {"text": axis["title"]}
        return go.Figure({"data": self.data, "layout": {"template": {}} | self.layout}, _validate=False)

    def _add(self, kind: str, trace: dict[str, Any]) -> None:
        given = {name: value for name, value in trace.items() if value is not None}
        if any(isinstance(value, pd.Series) for value in given.values()):
            raise TypeError(f"a trace of type {kind!r} was given a Series; give its values as an array or a list")
        self.data.append({"type": kind} | given)
