"""The loss scale over the steps of a run, with skipped steps and the window in which it is safe.

>>> scale_figure(scale_trace(run), skip_episodes(run), window=safe_window_over_time(run))
"""

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from amp_core.figures.axes import log2_axis, power_of_two, span
from amp_core.figures.colours import colour, faded
from amp_core.figures.figure_spec import FigureSpec
from amp_core.figures.lines import first_to_last, on_the_edge
from amp_core.figures.marks import MANY
from amp_core.figures.shapes import ORNAMENT, UNSEEN, numbers
from amp_core.figures.style import empty, finished, put

_BEYOND = 24
"""Octaves of the safe window that are shown beyond the loss scale itself: some windows have no end."""


def scale_figure(
    trace: pd.DataFrame,
    episodes: pd.DataFrame,
    dark: bool = False,
    title: str = "Loss scale",
    window: pd.DataFrame | None = None,
) -> go.Figure:
    """The loss scale in effect at each step on a log2 axis, skipped steps as crosses; from `scale_trace` and
    `skip_episodes`. Hovering over a cross tells its episode and which gradient was not finite. `window`, from
    `safe_window_over_time`, is a band behind the trace."""
    limits = span(trace["loss_scale"].to_numpy()) if len(trace) else None
    if limits is None:
        return empty(title, "No step was recorded yet." if not len(trace) else "No loss scale was recorded.")
    low, high = limits
    figure = FigureSpec()
    if window is not None and len(window):
        low, high = _band(figure, window, low, high, dark)
    room = max(1.0, 0.06 * (high - low))
    hue = colour("scale", dark)
    scale = trace["loss_scale"].where(trace["loss_scale"] > 0)
    powers, said = _as_powers(trace["loss_scale"])
    figure.add_scatter(
        x=numbers(trace["step"]),
        y=numbers(scale),
        mode="lines+markers" if len(trace) < 3 else "lines",
        line={"color": hue, "width": 2, "shape": "hv"},
        marker={"color": hue, "size": 7},
        name="loss scale",
        customdata=powers,
        hovertemplate=f"step %{{x:,}}: the loss is multiplied by {said} (%{{y:,}})<extra></extra>",
    )
    skipped = trace[trace["skipped"].to_numpy(dtype=bool)]
    many = len(skipped) > MANY  # crosses would lie on each other and hide the trace: strokes show them, each tells its
    if many:
        on_the_edge(figure, skipped["step"], high + 0.4 * room, high + room, "skipped step", dark)
        figure.data[-1] |= {"meta": ORNAMENT, "hoverinfo": "skip"}
        del figure.data[-1]["hovertemplate"]
    if len(skipped):
        figure.add_scatter(
            x=numbers(skipped["step"]),
            y=numbers(skipped["loss_scale"]),
            mode="markers",
            marker=UNSEEN if many else {"symbol": "x", "size": 8, "color": colour("skipped", dark)},
            name="skipped step",
            showlegend=not many,
            customdata=_stories(skipped["step"].to_numpy(), episodes),
            hovertemplate="step %{x:,}: skipped<br>%{customdata}<extra></extra>",
        )
    put(figure, xaxis={"title": "step", "range": first_to_last(trace["step"])})
    put(figure, yaxis={"title": "loss scale", **log2_axis(low - room, high + room)})
    first, last = trace["loss_scale"].iloc[0], trace["loss_scale"].iloc[-1]
    alt = f"Loss scale over {len(trace):,} steps, from {first:g} to {last:g}, with {len(skipped):,} skipped steps."
    return finished(figure, title, alt)


def _band(figure: FigureSpec, window: pd.DataFrame, low: float, high: float, dark: bool) -> tuple[float, float]:
    """The safe window as a band, and the axis that shows it, but no more than `_BEYOND` octaves of it."""
    floor, ceiling = 2.0 ** (low - _BEYOND), 2.0 ** (high + _BEYOND)
    there = window["lowest"] <= window["highest"]
    ends = [window[c].clip(floor, ceiling).where(there) for c in ("lowest", "highest")]
    hue = colour("healthy", dark)
    edges = (
        ("lowest", "lowest safe", None, "below this scale gradients underflow in FP16:"),
        ("highest", "safe for FP16, predicted", "tonexty", "above this scale gradients overflow in FP16:"),
    )
    for values, (column, name, fill, told) in zip(ends, edges, strict=True):
        powers, said = _as_powers(window[column])
        figure.add_scatter(
            x=numbers(window["step"]),
            y=numbers(values),
            mode="lines+markers" if len(window) < 3 else "lines",
            line={"color": faded(hue, 0.55), "width": 1, "shape": "hv"},
            marker={"color": hue, "size": 5},
            fill=fill,
            fillcolor=faded(hue, 0.24),
            name=name,
            showlegend=fill is not None,
            customdata=powers,
            hovertemplate=f"step %{{x:,}}: {told} {said}<extra></extra>",
        )
    limits = span(np.concatenate(ends))
    return (min(low, limits[0]), max(high, limits[1])) if limits else (low, high)


def _as_powers(values: "pd.Series[Any]") -> tuple[np.ndarray, str]:
    """What a hover needs to write values as powers of two: exponents where all are, as scales mostly are, else words;
    and the part of the template."""
    with np.errstate(divide="ignore", invalid="ignore"):
        exponents = np.log2(values.to_numpy(dtype=np.float64))
    if np.isfinite(exponents).all() and (exponents == exponents.round()).all() and (exponents >= 0).all():
        return exponents.astype(np.int16), "2<sup>%{customdata}</sup>"
    return np.array([power_of_two(value) for value in values], dtype=object), "%{customdata}"


def _stories(steps: np.ndarray, episodes: pd.DataFrame) -> np.ndarray:
    """For each skipped step its episode in words."""
    texts = []
    columns = ("first", "last", "skips", "scale_before", "scale_after", "tensors")
    for first, last, skips, before, after, tensors in zip(*(episodes[c].tolist() for c in columns), strict=True):
        many = f"steps {first:,} to {last:,} skipped in a row, " if skips > 1 else ""
        then = power_of_two(after) if np.isfinite(after) else "not known yet"
        cause = f"<br>not finite: {tensors}" if tensors else ""
        texts.append(f"{many}loss scale from {power_of_two(before)} to {then}{cause}")
    which = np.searchsorted(episodes["first"].to_numpy(), steps, side="right") - 1
    return np.array([texts[i] if i >= 0 else "" for i in which], dtype=object)
