"""What a format and a loss scale would take from each tensor, as predicted.

>>> lost_figure(what_if(run, ("fp16",), (16,), ("output_grad",)))
"""

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from amp_core.figures.axes import percent, tick_names
from amp_core.figures.colours import colour
from amp_core.figures.figure_spec import FigureSpec
from amp_core.figures.style import empty, finished

MAX_BARS = 40
LEAST = 1e-6
"""Left end of the axis; smaller shares are no bar, but told when pointed at."""

_LOSSES = (
    ("underflow_frac", "becomes 0, of elements", "underflow", ""),
    ("underflow_mass_frac", "becomes 0, of mass Σ|g|", "underflow", "/"),
    ("overflow_frac", "becomes ∞ or NaN, of elements", "overflow", "x"),
)


def lost_figure(predicted: pd.DataFrame, dark: bool = False, title: str = "Predicted losses") -> go.Figure:
    """Shares of each tensor that would underflow and overflow, on a log axis that stays the same for every scale.

    `predicted` has rows of `what_if` for one kind, format and scale. Of more than `MAX_BARS` tensors those are drawn
    that would lose most, and none that would lose nothing: few keep their rows, whatever the scale.
    """
    if not len(predicted):
        return empty(title, "No finite nonzero gradient was sampled yet.")
    total = len(predicted)
    under, over = (int((predicted[c] > 0).sum()) for c in ("underflow_frac", "overflow_frac"))
    if total > MAX_BARS:
        losing = predicted[(predicted[[c for c, *_ in _LOSSES]] > LEAST).any(axis=1)]
        worst = losing["overflow_frac"] * 1e6 + losing["underflow_frac"]
        predicted = losing.loc[worst.nlargest(MAX_BARS).index.sort_values()]
        if not len(predicted):
            return empty(title, f"None of the {total:,} tensors would lose {100 * LEAST:g} % or more.")
        title = f"{title}: the {len(predicted)} of {total:,} tensors that lose most"
    if not (predicted[[c for c, *_ in _LOSSES]] > LEAST).any(axis=None):
        return empty(title, "Nothing of what was recorded would be lost.")
    names = predicted["name"].tolist()
    figure = FigureSpec()
    for column, label, meaning, hatch in _LOSSES:
        shares = predicted[column].to_numpy(dtype=np.float64)
        figure.add_bar(
            x=np.where(shares > LEAST, shares, np.nan).astype(np.float32),
            y=names,
            orientation="h",
            name=label,
            marker=_marker(colour(meaning, dark), hatch, dark),
            customdata=[percent(s) if s > 0 else "0 %" for s in shares],
            hovertemplate=f"%{{y}}: %{{customdata}} {label}<extra></extra>",
        )
    ticks = [10.0**k for k in range(-6, 1)]
    figure.xaxis(
        title="share that would be lost", type="log", range=[-6, 0], tickvals=ticks, fixedrange=True,
        ticktext=[f"{100 * t:g} %" for t in ticks],
    )  # fmt: skip
    figure.yaxis(autorange="reversed", type="category", tickvals=names, ticktext=tick_names(names), showgrid=False)
    figure.yaxis(range=[len(names) - 0.5, -0.5], autorange=False)  # tensors without a bar keep their row
    alt = f"Bars of predicted losses: of {total:,} tensors {under:,} would underflow in part and {over:,} overflow."
    height = min(1500, max(260, 150 + 30 * len(names)))
    return finished(figure, title, alt, height, barmode="group", bargap=0.25)


def _marker(hue: str, hatch: str, dark: bool) -> dict[str, Any]:
    ground = "#11181B" if dark else "#FFFFFF"
    return {
        "color": hue,
        "line": {"width": 0},
        "pattern": {"shape": hatch, "size": 5, "fgcolor": ground, "fillmode": "overlay"},
    }
