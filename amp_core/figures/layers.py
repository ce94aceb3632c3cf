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

from amp_core.figures.axes import (
    COLORBAR_PX,
    exponent_axis,
    format_limits,
    log2_axis,
    log2_range,
    share_axis,
    share_cells,
)
from amp_core.figures.classes import CLASSES
from amp_core.figures.colours import PAGE, colour, limit_line, with_opacity
from amp_core.figures.figure_spec import FigureSpec
from amp_core.figures.lines import cell_edges
from amp_core.figures.shapes import NO_Y, compact_array, horizontal_line
from amp_core.figures.style import empty_figure, finish, set_layout
from amp_core.formats import FORMATS, Format

_LEFT_MARGIN_PX = 86
"""Left margin of each of the three figures, so that their steps align."""

_STACK = ("normal", "zero", "subnormal", "nan", "inf")
"""Classes from the axis upwards."""


def exponents_over_time(
    shares: pd.DataFrame,
    formats: Sequence[str] = ("fp16",),
    dark: bool = False,
    *,
    title: str = "Exponents over time",
    values: str = "value as stored",
    without: Sequence[int] = (),
) -> go.Figure:
    """Exponents × steps, from `layer_exponents`: the share of the values with each exponent at each step.

    The limits of `formats` (names from `amp_core.formats.FORMATS`) are labelled horizontal lines. Steps `without` a
    finite nonzero value are empty columns: otherwise their neighbours would be drawn over them.
    """
    if not len(shares):
        return empty_figure(title, "No finite nonzero value of this tensor was sampled yet.")
    sampled = shares["step"].to_numpy()
    steps = np.union1d(sampled, np.asarray(without, dtype=sampled.dtype))
    column = np.searchsorted(steps, sampled)
    lowest = int(shares["exponent"].min())
    grid = np.zeros((int(shares["exponent"].max()) - lowest + 1, len(steps)))
    grid[shares["exponent"].to_numpy() - lowest, column] = shares["share"].to_numpy()
    limits = [FORMATS[f] for f in formats]
    low, high = lowest - 2, lowest + grid.shape[0] + 2
    for fmt in limits:
        if fmt.powers_of_two < 64:
            low, high = min(low, fmt.min_subnormal_exponent - 3), max(high, fmt.max_exponent + 3)
    figure = FigureSpec()
    figure.add_heatmap(
        x=compact_array(steps),
        y=np.arange(lowest, lowest + grid.shape[0], dtype=np.float32) + 0.5,
        **share_cells(grid, dark),
        customdata=(100.0 * grid).astype(np.float32),
        hovertemplate="step %{x:,}, around 2<sup>%{y}</sup>: %{customdata:.3~r} % of the nonzero values<extra></extra>",
    )
    drawn = [pair for row, fmt in enumerate(limits) for pair in _limit_lines(fmt, low, high, row, dark)]
    set_layout(figure, shapes=[line for line, _ in drawn], annotations=[label for _, label in drawn])
    set_layout(figure, xaxis={"title": "step", "zeroline": False, "showgrid": False, "range": cell_edges(steps)})
    set_layout(figure, yaxis=exponent_axis(f"magnitude ({values})", low, high))
    alt = (
        f"Heatmap of the exponents of one tensor over {len(steps):,} sampled steps, from 2^{lowest} to "
        f"2^{lowest + grid.shape[0]}, with the limits of {', '.join(f.label for f in limits) or 'no format'}."
    )
    return finish(
        figure,
        title,
        alt,
        420 + COLORBAR_PX,
        margin={"l": _LEFT_MARGIN_PX, "b": 48 + COLORBAR_PX},
    )


def classes_over_time(trace: pd.DataFrame, dark: bool = False, title: str = "Classes of values") -> go.Figure:
    """The classes of the elements at each sampled step, from `layer_trace`; steps with infinite or NaN values
    also have crosses, however few those values are."""
    if not len(trace):
        return empty_figure(title, "This tensor was not sampled yet.")
    figure = FigureSpec()
    for name in _STACK:
        label, meaning, hatch = CLASSES[name]
        share = trace[f"{name}_frac"].fillna(0.0)
        if name != "normal" and not (share > 0).any():
            continue  # a line of zero thickness would only look like a border
        figure.add_area(
            trace["step"],
            share,
            colour(meaning, dark),
            "classes",
            fillpattern={"shape": hatch, "size": 6, "fgcolor": PAGE[dark], "fillmode": "overlay"},
            name=label,
            customdata=compact_array(100.0 * share),
            hovertemplate="%{customdata:.3~r} % of its elements",
        )
    bad = _add_nonfinite(figure, trace, 1.04, dark)
    set_layout(figure, xaxis={"title": "step", "range": cell_edges(trace["step"].to_numpy())})
    set_layout(figure, yaxis=share_axis("share of all elements", 1.0, 1.08))
    alt = f"Classes of values {_steps_in_words(trace)}; {bad:,} of them with infinities or not-a-number."
    return finish(
        figure,
        title,
        alt,
        300,
        margin={"l": _LEFT_MARGIN_PX},
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
    limits = log2_range(np.concatenate([trace["absmax"], trace["rms"]])) if len(trace) else None
    if limits is None:
        return empty_figure(title, "No finite nonzero value of this tensor was sampled yet.")
    low, high = limits
    for fmt in (FORMATS[f] for f in formats):
        if fmt.powers_of_two < 64:
            low, high = min(low, fmt.min_normal_exponent), max(high, math.log2(fmt.max_value))
    padding = max(1.0, 0.06 * (high - low))
    figure = FigureSpec()
    hue = colour("norm", dark)
    for column, name, line in (
        ("absmax", "largest magnitude", {"color": hue, "width": 2}),
        ("rms", "root mean square", {"color": hue, "width": 1.6, "dash": "dot"}),
    ):
        figure.add_line(
            trace["step"],
            trace[column].where(trace[column] > 0),
            line,
            name=name,
            hovertemplate="%{y:.3g} = 2<sup>%{customdata:.1f}</sup>",
            customdata=_log2(trace[column]),
        )
    _add_nonfinite(figure, trace, 2.0 ** (high + padding), dark)
    lines, labels = [], []
    for row, fmt in enumerate(FORMATS[f] for f in formats):
        for value, label in ((fmt.max_value, f"max. {fmt.max_value:.5g}"), (fmt.min_normal, "min. normal")):
            if low <= math.log2(value) <= high:
                lines.append(horizontal_line(value, line=limit_line(row, dark)))
                labels.append(_line_label(math.log10(value), f"{fmt.label} {label}", dark, right=True))
    set_layout(figure, shapes=lines, annotations=labels)
    set_layout(figure, xaxis={"title": "step", "range": cell_edges(trace["step"].to_numpy())})
    set_layout(figure, yaxis={"title": f"magnitude ({values})", **log2_axis(low - padding, high + 2 * padding)})
    alt = f"Magnitudes {_steps_in_words(trace)}, from 2^{limits[0]:.0f} to 2^{limits[1]:.0f}."
    return finish(figure, title, alt, 340, margin={"l": _LEFT_MARGIN_PX}, hovermode="x unified")


def _add_nonfinite(figure: FigureSpec, trace: pd.DataFrame, at: float, dark: bool) -> int:
    """A cross at the height `at` for each step with infinite or NaN values; returns their number."""
    bad = trace["step"][trace["inf_frac"].fillna(0.0) + trace["nan_frac"].fillna(0.0) > 0]
    if len(bad):
        figure.add_scatter(
            x=compact_array(bad),
            y=np.full(len(bad), at, dtype=np.float32),
            mode="markers",
            marker={"symbol": "x", "size": 8, "color": colour("overflow", dark)},
            name="∞ or NaN",
            meta=NO_Y,
            hoverinfo="skip",
        )
    return len(bad)


def _steps_in_words(trace: pd.DataFrame) -> str:
    return f"over the sampled steps {trace['step'].iloc[0]:,} to {trace['step'].iloc[-1]:,}"


def _log2(values: "pd.Series[float]") -> np.ndarray:
    exponents: np.ndarray = np.log2(values.where(values > 0).to_numpy(dtype=np.float64)).astype(np.float32)
    return exponents


def _limit_lines(fmt: Format, low: int, high: int, row: int, dark: bool) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Line and label of each limit of a format within the axis."""
    inside = [(at, f"{fmt.label} {label}") for at, label in format_limits(fmt) if low <= at <= high]
    return [(horizontal_line(at, line=limit_line(row, dark)), _line_label(at, label, dark)) for at, label in inside]


def _line_label(y: float, text: str, dark: bool, right: bool = False) -> dict[str, Any]:
    """A label at one end of a horizontal line, readable over the data."""
    return {
        "x": float(right), "xref": "paper", "y": y, "text": text, "showarrow": False,
        "xanchor": "right" if right else "left", "yanchor": "bottom", "bgcolor": with_opacity(PAGE[dark], 0.9),
        "font": {"size": 11, "color": colour("limit", dark)}, "borderpad": 1,
    }  # fmt: skip
