"""The loss scale over the steps of a run, with skipped steps and the window in which it is safe.

>>> scale_figure(scale_trace(run), skip_episodes(run), window=safe_window_over_time(run))
"""

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from amp_core.figures.axes import log2_axis, log2_range, power_of_two
from amp_core.figures.colours import colour, with_opacity
from amp_core.figures.figure_spec import FigureSpec
from amp_core.figures.lines import add_edge_crosses, step_range
from amp_core.figures.marks import MAX_CROSSES
from amp_core.figures.shapes import INVISIBLE_MARKER, ORNAMENT, compact_array
from amp_core.figures.style import empty_figure, finish, set_layout

_MAX_OCTAVES_BEYOND = 24
"""Most octaves of the safe window shown beyond the loss scale itself: some windows are unbounded."""


def scale_figure(
    trace: pd.DataFrame,
    episodes: pd.DataFrame,
    dark: bool = False,
    title: str = "Loss scale",
    window: pd.DataFrame | None = None,
) -> go.Figure:
    """The loss scale in effect at each step on a log2 axis, skipped steps as crosses; from `scale_trace` and
    `skip_episodes`. Hovering over a cross shows its episode and which gradient was not finite. `window`, from
    `safe_window_over_time`, is a band behind the trace."""
    limits = log2_range(trace["loss_scale"].to_numpy()) if len(trace) else None
    if limits is None:
        return empty_figure(title, "No step was recorded yet." if not len(trace) else "No loss scale was recorded.")
    low, high = limits
    figure = FigureSpec()
    if window is not None and len(window):
        low, high = _band(figure, window, low, high, dark)
    padding = max(1.0, 0.06 * (high - low))
    hue = colour("scale", dark)
    scale = trace["loss_scale"].where(trace["loss_scale"] > 0)
    powers, template = _as_powers(trace["loss_scale"])
    figure.add_line(
        trace["step"],
        scale,
        {"color": hue, "width": 2, "shape": "hv"},
        name="loss scale",
        customdata=powers,
        hovertemplate=f"step %{{x:,}}: the loss is multiplied by {template} (%{{y:,}})<extra></extra>",
    )
    skipped = trace[trace["skipped"].to_numpy(dtype=bool)]
    many = len(skipped) > MAX_CROSSES  # crosses would overlap and hide the trace, so strokes show them
    if many:
        add_edge_crosses(figure, skipped["step"], high + 0.4 * padding, high + padding, "skipped step", dark)
        figure.data[-1] |= {"meta": ORNAMENT, "hoverinfo": "skip"}
        del figure.data[-1]["hovertemplate"]
    if len(skipped):
        figure.add_scatter(
            x=compact_array(skipped["step"]),
            y=compact_array(skipped["loss_scale"]),
            mode="markers",
            marker=INVISIBLE_MARKER if many else {"symbol": "x", "size": 8, "color": colour("skipped", dark)},
            name="skipped step",
            showlegend=not many,
            customdata=_episode_texts(skipped["step"].to_numpy(), episodes),
            hovertemplate="step %{x:,}: skipped<br>%{customdata}<extra></extra>",
        )
    set_layout(figure, xaxis={"title": "step", "range": step_range(trace["step"])})
    set_layout(figure, yaxis={"title": "loss scale", **log2_axis(low - padding, high + padding)})
    first, last = trace["loss_scale"].iloc[0], trace["loss_scale"].iloc[-1]
    alt = f"Loss scale over {len(trace):,} steps, from {first:g} to {last:g}, with {len(skipped):,} skipped steps."
    return finish(figure, title, alt)


def _band(figure: FigureSpec, window: pd.DataFrame, low: float, high: float, dark: bool) -> tuple[float, float]:
    """Draw the safe window as a band; the axis that includes at most `_MAX_OCTAVES_BEYOND` octaves of it."""
    floor, ceiling = 2.0 ** (low - _MAX_OCTAVES_BEYOND), 2.0 ** (high + _MAX_OCTAVES_BEYOND)
    exists = window["lowest"] <= window["highest"]
    ends = [window[c].clip(floor, ceiling).where(exists) for c in ("lowest", "highest")]
    hue = colour("healthy", dark)
    edges = (
        ("lowest", "lowest safe", None, "below this scale gradients underflow in FP16:"),
        ("highest", "safe for FP16, predicted", "tonexty", "above this scale gradients overflow in FP16:"),
    )
    for values, (column, name, fill, text) in zip(ends, edges, strict=True):
        powers, template = _as_powers(window[column])
        figure.add_scatter(
            x=compact_array(window["step"]),
            y=compact_array(values),
            mode="lines+markers" if len(window) < 3 else "lines",
            line={"color": with_opacity(hue, 0.55), "width": 1, "shape": "hv"},
            marker={"color": hue, "size": 5},
            fill=fill,
            fillcolor=with_opacity(hue, 0.24),
            name=name,
            showlegend=fill is not None,
            customdata=powers,
            hovertemplate=f"step %{{x:,}}: {text} {template}<extra></extra>",
        )
    limits = log2_range(np.concatenate(ends))
    return (min(low, limits[0]), max(high, limits[1])) if limits else (low, high)


def _as_powers(values: "pd.Series[Any]") -> tuple[np.ndarray, str]:
    """Hover data for values as powers of two: exponents if all values are powers of two, else texts;
    and the template for them."""
    with np.errstate(divide="ignore", invalid="ignore"):
        exponents = np.log2(values.to_numpy(dtype=np.float64))
    if np.isfinite(exponents).all() and (exponents == exponents.round()).all() and (exponents >= 0).all():
        return exponents.astype(np.int16), "2<sup>%{customdata}</sup>"
    return np.array([power_of_two(value) for value in values], dtype=object), "%{customdata}"


def _episode_texts(steps: np.ndarray, episodes: pd.DataFrame) -> np.ndarray:
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
