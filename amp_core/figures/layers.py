"""One tensor over the steps at which it was sampled.

>>> exponents_over_time(layer_exponents(run, "output_grad", "head"), formats=("fp16",))
>>> classes_over_time(layer_trace(run, "output_grad", "head"))
>>> magnitude_figure(layer_trace(run, "output_grad", "head"), formats=("fp16",))
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from amp_core.figures.axes import BAR, bar_below, exponent_axis, log2_axis, raised, share_axis, span
from amp_core.figures.colours import PAGE, SHARES, colour, faded
from amp_core.figures.figure_spec import FigureSpec
from amp_core.figures.lines import outer_edges
from amp_core.figures.shapes import NO_Y, level, numbers
from amp_core.figures.style import empty, finished, put
from amp_core.formats import FORMATS, Format

_MIN_DECADES = -5
_LEFT = 86
"""Room for the ticks of each of the three figures, so that steps stand below each other."""

_CLASSES = (
    ("normal_frac", "normal", "healthy", ""),
    ("zero_frac", "exactly zero", "zero", ""),
    ("subnormal_frac", "subnormal", "underflow", "/"),
    ("nan_frac", "NaN", "nan", "."),
    ("inf_frac", "infinite", "overflow", "x"),
)
"""Column, words, meaning and hatching."""


def exponents_over_time(
    shares: pd.DataFrame,
    formats: Sequence[str] = ("fp16",),
    dark: bool = False,
    *,
    title: str = "Exponents over time",
    values: str = "value as stored",
    without: Sequence[int] = (),
) -> go.Figure:
    """Exponents × steps, from `layer_exponents`: how large a share of the values has which exponent at which step.

    The limits of `formats` (names from `amp_core.formats.FORMATS`) are horizontal lines with labels. Steps `without` a
    finite nonzero value are columns too, empty: otherwise their neighbours would be drawn over them.
    """
    if not len(shares):
        return empty(title, "No finite nonzero value of this tensor was sampled yet.")
    there = shares["step"].to_numpy()
    steps = np.union1d(there, np.asarray(without, dtype=there.dtype))
    column = np.searchsorted(steps, there)
    lowest = int(shares["exponent"].min())
    grid = np.zeros((int(shares["exponent"].max()) - lowest + 1, len(steps)))
    grid[shares["exponent"].to_numpy() - lowest, column] = shares["share"].to_numpy()
    limits = [FORMATS[f] for f in formats]
    low, high = lowest - 2, lowest + grid.shape[0] + 2
    for fmt in limits:
        if fmt.powers_of_two < 64:
            low, high = min(low, fmt.min_subnormal_exponent - 3), max(high, fmt.max_exponent + 3)
    with np.errstate(divide="ignore"):
        decades = np.log10(grid)
    ticks = list(range(_MIN_DECADES, 1))
    figure = FigureSpec()
    figure.add_heatmap(
        x=numbers(steps),
        y=np.arange(lowest, lowest + grid.shape[0], dtype=np.float32) + 0.5,
        z=np.where(grid > 0, np.maximum(decades, _MIN_DECADES), np.nan).astype(np.float32),
        zmin=_MIN_DECADES,
        zmax=0,
        colorscale=[list(stop) for stop in SHARES[dark]],
        colorbar=bar_below("of nonzero<br>values", ticks, [f"{100 * 10.0**k:g} %" for k in ticks]),
        customdata=(100.0 * grid).astype(np.float32),
        hovertemplate="step %{x:,}, around 2<sup>%{y}</sup>: %{customdata:.3~r} % of the nonzero values<extra></extra>",
    )
    drawn = [pair for row, fmt in enumerate(limits) for pair in _limit_lines(fmt, low, high, row, dark)]
    put(figure, shapes=[line for line, _ in drawn], annotations=[label for _, label in drawn])
    put(figure, xaxis={"title": "step", "zeroline": False, "showgrid": False, "range": outer_edges(steps)})
    put(figure, yaxis=exponent_axis(f"magnitude ({values})", low, high))
    alt = (
        f"Heatmap of the exponents of one tensor over {len(steps):,} sampled steps, from 2^{lowest} to "
        f"2^{lowest + grid.shape[0]}, with the limits of {', '.join(f.label for f in limits) or 'no format'}."
    )
    return finished(figure, title, alt, 420 + BAR, margin={"l": _LEFT, "b": 48 + BAR}, legend={"y": BAR / (420 + BAR)})


def classes_over_time(trace: pd.DataFrame, dark: bool = False, title: str = "Classes of values") -> go.Figure:
    """How the elements divide into classes at each sampled step, from `layer_trace`; steps with infinite or NaN values
    are crosses as well, however few those are."""
    if not len(trace):
        return empty(title, "This tensor was not sampled yet.")
    figure = FigureSpec()
    for column, label, meaning, hatch in _CLASSES:
        if column != "normal_frac" and not (trace[column] > 0).any():
            continue  # a line of zero thickness would only look like a border
        hue = colour(meaning, dark)
        figure.add_scatter(
            x=numbers(trace["step"]),
            y=numbers(trace[column].fillna(0.0)),
            mode="lines+markers" if len(trace) < 3 else "lines",
            line={"color": hue, "width": 0.8},
            marker={"color": hue, "size": 7},
            fillcolor=faded(hue, 0.85),
            fillpattern={"shape": hatch, "size": 6, "fgcolor": PAGE[dark], "fillmode": "overlay"},
            stackgroup="classes",
            name=label,
            customdata=numbers(100.0 * trace[column].fillna(0.0)),
            hovertemplate="%{customdata:.3~r} % of its elements",
        )
    bad = trace[trace["inf_frac"].fillna(0.0) + trace["nan_frac"].fillna(0.0) > 0]
    if len(bad):
        figure.add_scatter(
            x=numbers(bad["step"]),
            y=np.full(len(bad), 1.04, dtype=np.float32),
            mode="markers",
            marker={"symbol": "x", "size": 8, "color": colour("overflow", dark)},
            name="∞ or NaN",
            meta=NO_Y,
            hoverinfo="skip",
        )
    put(figure, xaxis={"title": "step", "range": outer_edges(trace["step"].to_numpy())})
    put(figure, yaxis=share_axis("share of all elements", 1.0, 1.08))
    alt = f"Classes of values {_over(trace)}; {len(bad):,} of them with infinities or not-a-number."
    return finished(
        figure,
        title,
        alt,
        300,
        margin={"l": _LEFT},
        hovermode="x unified",
    )


def magnitude_figure(
    trace: pd.DataFrame,
    formats: Sequence[str] = ("fp16",),
    dark: bool = False,
    title: str = "Magnitudes",
    values: str = "value as stored",
) -> go.Figure:
    """Largest magnitude and root mean square at each sampled step on a log2 axis, from `layer_trace`, with the largest
    and the smallest normal value of `formats`. A step with infinite or NaN values is a cross on the upper edge."""
    limits = span(np.concatenate([trace["absmax"], trace["rms"]])) if len(trace) else None
    if limits is None:
        return empty(title, "No finite nonzero value of this tensor was sampled yet.")
    low, high = limits
    for fmt in (FORMATS[f] for f in formats):
        if fmt.powers_of_two < 64:
            low, high = min(low, fmt.min_normal_exponent), max(high, math.log2(fmt.max_value))
    room = max(1.0, 0.06 * (high - low))
    figure = FigureSpec()
    hue = colour("norm", dark)
    for column, name, line in (
        ("absmax", "largest magnitude", {"color": hue, "width": 2}),
        ("rms", "root mean square", {"color": hue, "width": 1.6, "dash": "dot"}),
    ):
        figure.add_scatter(
            x=numbers(trace["step"]),
            y=numbers(trace[column].where(trace[column] > 0)),
            mode="lines+markers" if len(trace) < 3 else "lines",
            line=line,
            marker={"color": hue, "size": 7},
            name=name,
            hovertemplate="%{y:.3g} = 2<sup>%{customdata:.1f}</sup>",
            customdata=_log2(trace[column]),
        )
    bad = trace[trace["inf_frac"].fillna(0.0) + trace["nan_frac"].fillna(0.0) > 0]
    if len(bad):
        figure.add_scatter(
            x=numbers(bad["step"]),
            y=np.full(len(bad), 2.0 ** (high + room), dtype=np.float32),
            mode="markers",
            marker={"symbol": "x", "size": 8, "color": colour("overflow", dark)},
            name="∞ or NaN",
            meta=NO_Y,
            hoverinfo="skip",
        )
    lines, labels = [], []
    for row, fmt in enumerate(FORMATS[f] for f in formats):
        dash = ("solid", "dash", "dot")[row % 3]
        for value, label in ((fmt.max_value, f"max. {fmt.max_value:.5g}"), (fmt.min_normal, "min. normal")):
            if low <= math.log2(value) <= high:
                lines.append(level(value, line={"color": colour("limit", dark), "width": 1.4, "dash": dash}))
                labels.append(_beside(math.log10(value), f"{fmt.label} {label}", dark, right=True))
    put(figure, shapes=lines, annotations=labels)
    put(figure, xaxis={"title": "step", "range": outer_edges(trace["step"].to_numpy())})
    put(figure, yaxis={"title": f"magnitude ({values})", **log2_axis(low - room, high + 2 * room)})
    alt = f"Magnitudes {_over(trace)}, from 2^{limits[0]:.0f} to 2^{limits[1]:.0f}."
    return finished(figure, title, alt, 340, margin={"l": _LEFT}, hovermode="x unified")


def _over(trace: pd.DataFrame) -> str:
    return f"over the sampled steps {trace['step'].iloc[0]:,} to {trace['step'].iloc[-1]:,}"


def _log2(values: "pd.Series[float]") -> np.ndarray:
    exponents: np.ndarray = np.log2(values.where(values > 0).to_numpy(dtype=np.float64)).astype(np.float32)
    return exponents


def _limit_lines(fmt: Format, low: int, high: int, row: int, dark: bool) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each limit of a format that is on the axis: its line and its label."""
    look = {"color": colour("limit", dark), "width": 1.4, "dash": ("solid", "dash", "dot")[row % 3]}
    marks = (
        (float(fmt.min_subnormal_exponent), f"min. subnormal {raised(fmt.min_subnormal_exponent)}"),
        (float(fmt.min_normal_exponent), f"min. normal {raised(fmt.min_normal_exponent)}"),
        (math.log2(fmt.max_value), f"max. {fmt.max_value:.5g}"),
    )
    inside = [(at, f"{fmt.label} {label}") for at, label in marks if low <= at <= high]
    return [(level(at, line=look), _beside(at, label, dark)) for at, label in inside]


def _beside(y: float, text: str, dark: bool, right: bool = False) -> dict[str, Any]:
    """A label on a horizontal line, at one end of it, readable over what is drawn there."""
    return {
        "x": float(right), "xref": "paper", "y": y, "text": text, "showarrow": False,
        "xanchor": "right" if right else "left", "yanchor": "bottom", "bgcolor": faded(PAGE[dark], 0.9),
        "font": {"size": 11, "color": colour("limit", dark)}, "borderpad": 1,
    }  # fmt: skip
