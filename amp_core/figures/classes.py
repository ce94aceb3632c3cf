"""Classes of values: the shares of each tensor that are zero, normal, subnormal, infinite or NaN.

>>> class_bars(class_shares(run, "output_grad"))
"""

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from amp_core.figures.axes import percent, share_axis, tick_names
from amp_core.figures.colours import bar_marker, colour
from amp_core.figures.figure_spec import FigureSpec
from amp_core.figures.style import empty_figure, finish, set_layout

MAX_BARS = 30

CLASSES = {
    "zero": ("exactly zero", "zero", ""),
    "normal": ("normal", "healthy", ""),
    "subnormal": ("subnormal", "underflow", "/"),
    "inf": ("infinite", "overflow", "x"),
    "nan": ("NaN", "nan", "."),
}
"""Words, meaning and hatching of each class of values."""


def class_bars(shares: pd.DataFrame, dark: bool = False, title: str = "Classes of values") -> go.Figure:
    """The classes of each tensor's elements as stacked bars; from `class_shares`.

    At most `MAX_BARS` tensors are drawn: those with the largest share of values that are neither normal nor zero.
    """
    if not len(shares):
        return empty_figure(title, "No tensor was sampled yet.")
    total = len(shares)
    odd = shares[["inf_frac", "nan_frac"]].sum(axis=1) * 1e6 + shares["subnormal_frac"].fillna(0.0)
    if total > MAX_BARS:
        shares = shares.loc[odd.nlargest(MAX_BARS).index.sort_values()]
        title = f"{title}: the {MAX_BARS} of {total:,} tensors with the most infinite, NaN or subnormal ones"
    names = shares["name"].tolist()
    figure = FigureSpec()
    for column, (label, meaning, hatch) in CLASSES.items():
        if not (shares[f"{column}_frac"] > 0).any():
            continue
        hue = colour(meaning, dark)
        figure.add_bar(
            x=_lengths(shares[f"{column}_frac"]),
            y=names,
            name=label,
            marker=bar_marker(hue, hatch, dark),
            customdata=100.0 * _lengths(shares[f"{column}_frac"]),
            hovertemplate=f"%{{y}}: %{{customdata:.3~r}} % {label}<extra></extra>",
        )
    figure.add_labels(
        np.ones(len(names)), names, [_remark(row) for row in shares.to_dict("records")], textfont={"size": 11}
    )
    set_layout(figure, xaxis=share_axis("share of all elements"))
    figure.categories(names, tick_names(names))
    worst = int((shares[["inf_frac", "nan_frac"]].sum(axis=1) > 0).sum())
    alt = f"Bars of {len(names):,} tensors by class of value; {worst:,} of them hold infinite or NaN values."
    height = min(1400, max(240, 150 + 24 * len(names)))
    return finish(
        figure,
        title,
        alt,
        height,
        barmode="stack",
        bargap=0.25,
        margin={"l": 64, "r": 132, "t": 52, "b": 48},
    )


def _lengths(values: "pd.Series[float]") -> np.ndarray:
    """Shares for a stacked bar; those that were not recorded are 0."""
    return values.fillna(0.0).to_numpy(dtype=np.float32)


def _remark(row: Mapping[Hashable, Any]) -> str:
    """Text beside a bar for classes that matter even if they are too small to see."""
    texts = [
        f"{percent(row[f'{column}_frac'])} {label}"
        for column, label in (("inf", "inf"), ("nan", "NaN"), ("subnormal", "subn."))
        if row[f"{column}_frac"] > 0
    ]
    return "  " + ", ".join(texts[:2])
