"""Skipped steps and changes of the watching, marked along the bottom of a figure over steps.

>>> with_marks(loss_figure(curves), step_marks(run), "step")
"""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from amp_core.figures.style import colour, numbers

_KINDS = (("skipped", "skipped step", "x-thin", "skipped"), ("change", "watching changed", "triangle-up", "limit"))


def with_marks(figure: go.Figure, marks: pd.DataFrame, x: str = "step", dark: bool = False) -> go.Figure:
    """`figure` with a row of marks at its lower edge, from `step_marks`; `x` is `step`, `samples` or `time_s`.

    They stand on an axis of their own, so the range of the figure's own values does not move, and zooming keeps them.
    """
    if not len(marks) or not figure.data:
        return figure
    said = []
    for kind, name, symbol, meaning in _KINDS:
        some = marks[(marks["kind"] == kind) & marks[x].notna()]
        if not len(some):
            continue
        hue = colour(meaning, dark)
        figure.add_scatter(
            x=numbers(some[x]),
            y=np.full(len(some), 0.015, dtype=np.float32),
            yaxis="y9",
            mode="markers",
            marker={"symbol": symbol, "size": 7, "color": hue, "line": {"color": hue, "width": 1.6}},
            name=name,
            customdata=np.stack([some["step"].to_numpy().astype(object), some["what"].to_numpy()], axis=1),
            hovertemplate="step %{customdata[0]:,}: %{customdata[1]}<extra></extra>",
        )
        said.append(f"{len(some):,} marked as {name}")
    if said:
        figure.update_layout(
            yaxis9={"overlaying": "y", "side": "right", "range": [0, 1], "visible": False, "fixedrange": True},
            meta={"alt": f"{figure.layout.meta['alt'].rstrip('.')}; {', '.join(said)}."},
        )
    return figure
