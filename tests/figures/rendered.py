"""Reads the contents of a figure, for tests.

>>> trace(figure, "loss scale").x, texts(figure), limits(figure)
"""

import plotly.graph_objects as go


def trace(figure: go.Figure, name: str) -> go.Scatter:
    return next(t for t in figure.data if t.name == name)


def texts(figure: go.Figure) -> list[str]:
    return [a.text for a in figure.layout.annotations]


def limits(figure: go.Figure) -> list[float]:
    return [s.x0 for s in figure.layout.shapes if s.type == "line"]
