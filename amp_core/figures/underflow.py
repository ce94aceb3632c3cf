"""Predicted underflow and overflow of each tensor in a format at a loss scale.

>>> underflow_figure(what_if(run, ("fp16",), (16,), ("output_grad",)))
"""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from amp_core.figures.axes import percent, tick_names
from amp_core.figures.colours import bar_marker, colour
from amp_core.figures.figure_spec import FigureSpec
from amp_core.figures.style import empty_figure, finish

MAX_BARS = 40
MIN_SHOWN_FRAC = 1e-6
"""Left end of the axis; smaller shares have no bar, only a hover text."""

_LOSSES = (
    ("underflow_frac", "becomes 0, of elements", "underflow", ""),
    ("underflow_mass_frac", "becomes 0, of mass Σ|g|", "underflow", "/"),
    ("overflow_frac", "becomes ∞ or NaN, of elements", "overflow", "x"),
)


def underflow_figure(predicted: pd.DataFrame, dark: bool = False, title: str = "Predicted losses") -> go.Figure:
    """Shares of each tensor that would underflow and overflow, on a log axis that stays the same for every scale.

    `predicted` has rows of `what_if` for one kind, format and scale. With more than `MAX_BARS` tensors, only those
    that would lose the most are drawn; with fewer, each keeps its row at every scale.
    """
    if not len(predicted):
        return empty_figure(title, "No finite nonzero gradient was sampled yet.")
    total = len(predicted)
    under, over = (int((predicted[c] > 0).sum()) for c in ("underflow_frac", "overflow_frac"))
    if total > MAX_BARS:
        losing = predicted[(predicted[[c for c, *_ in _LOSSES]] > MIN_SHOWN_FRAC).any(axis=1)]
        worst = losing["overflow_frac"] * 1e6 + losing["underflow_frac"]
        predicted = losing.loc[worst.nlargest(MAX_BARS).index.sort_values()]
        if not len(predicted):
            return empty_figure(title, f"None of the {total:,} tensors would lose {100 * MIN_SHOWN_FRAC:g} % or more.")
        title = f"{title}: the {len(predicted)} of {total:,} tensors that lose most"
    if not (predicted[[c for c, *_ in _LOSSES]] > MIN_SHOWN_FRAC).any(axis=None):
        return empty_figure(title, "Nothing of what was recorded would be lost.")
    names = predicted["name"].tolist()
    figure = FigureSpec()
    for column, label, meaning, hatch in _LOSSES:
        shares = predicted[column].to_numpy(dtype=np.float64)
        figure.add_bar(
            x=np.where(shares > MIN_SHOWN_FRAC, shares, np.nan).astype(np.float32),
            y=names,
            name=label,
            marker=bar_marker(colour(meaning, dark), hatch, dark),
            customdata=[percent(s) if s > 0 else "0 %" for s in shares],
            hovertemplate=f"%{{y}}: %{{customdata}} {label}<extra></extra>",
        )
    ticks = [10.0**k for k in range(-6, 1)]
    figure.xaxis(
        title="share that would be lost", type="log", range=[-6, 0], tickvals=ticks, fixedrange=True,
        ticktext=[f"{100 * t:g} %" for t in ticks],
    )  # fmt: skip
    figure.categories(names, tick_names(names))
    figure.yaxis(range=[len(names) - 0.5, -0.5], autorange=False)  # tensors without a bar keep their row
    alt = f"Bars of predicted losses: of {total:,} tensors {under:,} would underflow in part and {over:,} overflow."
    height = min(1500, max(260, 150 + 30 * len(names)))
    return finish(figure, title, alt, height, barmode="group", bargap=0.25)
