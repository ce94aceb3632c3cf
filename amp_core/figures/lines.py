"""Curves over the steps of a run: loss, gradient norm, memory.

>>> loss_figure(loss_curves([run_fp32, run_fp16], most=4000))
>>> grad_norm_figure(thin(scale_trace(run), "step", "grad_norm", keep="skipped"))
"""

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from amp_core.figures.marks import MANY
from amp_core.figures.style import (
    DASHES,
    colour,
    comb,
    empty,
    faded,
    finished,
    log2_axis,
    mended,
    numbers,
    power_of_two,
    put,
    recipe_colour,
    shortened,
    span,
)

_BEYOND = 24
"""Octaves of the safe window that are shown beyond the loss scale itself: some windows have no end."""

_X_TITLES = {"step": "step", "samples": "samples seen", "time_s": "time since the start (s)"}


def loss_figure(
    curves: pd.DataFrame,
    dark: bool = False,
    log: bool = False,
    title: str = "Loss",
    band: pd.DataFrame | None = None,
) -> go.Figure:
    """The loss of each run in the colour of its recipe: as recorded (thin) and smoothed (thick), from `loss_curves`.

    Behind them the noise of the first recipe from seed to seed, where `band` (from `noise_band`) has any. Runs of one
    recipe differ in their dashes. Where a loss is not finite for the first time a dotted line says so.
    """
    if not len(curves):
        return empty(title, "No loss was recorded yet.")
    x = next(c for c in _X_TITLES if c in curves.columns)
    figure = go.Figure()
    groups = [(str(run), curve) for run, curve in curves.groupby("run", sort=False)]
    if band is not None and len(band):
        _noise(figure, band, x, recipe_colour(groups[0][1]["precision"].iloc[0], dark))
    for _, curve in groups:  # beneath all the thick ones
        figure.add_scatter(
            x=numbers(curve[x]),
            y=numbers(curve["loss"]),
            mode="lines",
            line={
                "color": faded(recipe_colour(curve["precision"].iloc[0], dark), 0.4 if len(groups) < 3 else 0.22),
                "width": 1,
            },
            legendgroup=str(curve["run"].iloc[0]),
            showlegend=False,
            hoverinfo="skip",
        )
    used: dict[object, int] = {}
    said = []
    for run, curve in groups:
        recipe = curve["precision"].iloc[0]
        hue = recipe_colour(recipe, dark)
        dash = DASHES[used.get(recipe, 0) % len(DASHES)]
        used[recipe] = used.get(recipe, 0) + 1
        name = shortened(run)
        figure.add_scatter(
            x=numbers(curve[x]),
            y=numbers(curve["smooth"]),
            mode="lines+markers" if len(curve) < 3 else "lines",
            line={"color": hue, "width": 2.2, "dash": dash},
            marker={"color": hue, "size": 7},
            name=name,
            legendgroup=run,
            customdata=numbers(curve["loss"]),
            hovertemplate="loss %{customdata:.4g}, smoothed %{y:.4g}",
        )
        broken = np.flatnonzero(~np.isfinite(curve["loss"].to_numpy()))
        if len(broken):
            at = curve[x].iloc[broken[0]]
            figure.add_vline(x=at, line={"color": colour("overflow", dark), "width": 1.5, "dash": "dot"})
            figure.add_annotation(
                x=at, y=1, yref="paper", text=f"{name}: not finite", showarrow=False, xanchor="right", yanchor="top"
            )
            said.append(f"the loss of {run} is not finite from {x} {at:g} on")
        else:
            said.append(f"{run} goes from {curve['loss'].iloc[0]:.3g} to {curve['loss'].iloc[-1]:.3g}")
    put(figure, xaxis={"title": _X_TITLES[x]})
    put(figure, yaxis={"title": "loss", "type": "log" if log else "linear"})
    return finished(figure, title, f"Loss over {_X_TITLES[x]}: {'; '.join(said)}.", hovermode="x unified")


def _noise(figure: go.Figure, band: pd.DataFrame, x: str, hue: str) -> None:
    """The band from `low` to `high`, behind everything."""
    line = {"width": 0, "color": hue}
    common = {"x": numbers(band[x]), "mode": "lines", "line": line, "hoverinfo": "skip", "legendgroup": "noise"}
    figure.add_scatter(y=numbers(band["low"]), showlegend=False, **common)
    name = "noise from seed to seed"
    figure.add_scatter(y=numbers(band["high"]), fill="tonexty", fillcolor=faded(hue, 0.3), name=name, **common)


def grad_norm_figure(trace: pd.DataFrame, dark: bool = False, title: str = "Gradient norm") -> go.Figure:
    """The unscaled 2-norm of all gradients per step, from `scale_trace`, on a log2 axis.

    A step whose norm is not finite has no point on the axis: it is a cross on the upper edge.
    """
    limits = span(trace["grad_norm"].to_numpy()) if len(trace) else None
    bad = ~np.isfinite(trace["grad_norm"].to_numpy(dtype=np.float64)) & trace["skipped"].to_numpy(dtype=bool)
    if limits is None and not bad.any():
        return empty(title, "No gradient norm was recorded yet.")
    low, high = limits or (-1.0, 0.0)
    room = max(1.0, 0.06 * (high - low))
    figure = go.Figure()
    steps, norm = mended(trace["step"], trace["grad_norm"].where(np.isfinite(trace["grad_norm"])))
    figure.add_scatter(
        x=numbers(steps),
        y=numbers(norm),
        mode="lines+markers" if len(trace) < 3 else "lines",
        line={"color": colour("norm", dark), "width": 1.6},
        marker={"color": colour("norm", dark), "size": 7},
        name="gradient norm",
        hovertemplate="step %{x:,}: length of the whole gradient %{y:.3g}<extra></extra>",
    )
    top = high + 1.5 * room
    if bad.any():
        _on_the_edge(figure, trace["step"][bad], high + room, top, "not finite: step skipped", dark)
    put(figure, xaxis={"title": "step", "range": _steps_shown(trace)})
    put(figure, yaxis={"title": "2-norm of all gradients, unscaled", **log2_axis(low - room, top)})
    alt = f"Gradient norm over {len(trace):,} steps, from 2^{low:.0f} to 2^{high:.0f}; {bad.sum():,} not finite."
    return finished(figure, title, alt)


def memory_figure(
    trace: pd.DataFrame, dark: bool = False, what: str = "held at the step", title: str = "Memory"
) -> go.Figure:
    """Bytes held at each step and the highest so far, from `memory_trace`; `what` is `what_memory(run)`."""
    if not len(trace):
        return empty(title, "No memory was recorded yet.")
    top = max(float(trace[c].max()) for c in ("allocated_bytes", "peak_bytes"))
    size, unit = (2.0**30, "GiB") if top >= 2**30 else (2.0**20, "MiB")
    hue = colour("memory", dark)
    figure = go.Figure()
    shapes = (
        ("peak_bytes", "highest so far", {"color": hue, "width": 1.4, "dash": "dot"}, None),
        ("allocated_bytes", "at the step", {"color": hue, "width": 2}, "tozeroy"),
    )
    for column, name, line, fill in shapes:
        figure.add_scatter(
            x=numbers(trace["step"]),
            y=numbers(trace[column] / size),
            mode="lines+markers" if len(trace) < 3 else "lines",
            line=line,
            marker={"color": hue, "size": 7},
            fill=fill,
            fillcolor=faded(hue, 0.12),
            name=name,
            hovertemplate=f"%{{y:.3g}} {unit} held",
        )
    put(figure, xaxis={"title": "step", "range": _steps_shown(trace)})
    put(figure, yaxis={"title": f"memory ({unit})", "range": [0, 1.1 * top / size]})
    alt = f"Memory, {what}, over {len(trace):,} steps; highest {top / size:.3g} {unit}."
    return finished(figure, f"{title}: {what}", alt, hovermode="x unified")


def _on_the_edge(figure: go.Figure, steps: "pd.Series[Any]", at: float, top: float, name: str, dark: bool) -> None:
    """A cross for each step at 2^`at`; of many, which would lie on each other, a stroke from the edge 2^`top` down."""
    hue = colour("skipped", dark)
    places, strokes = numbers(steps), len(steps) > MANY
    x, y = comb(places, 2.0 ** (top + 4), 2.0**at) if strokes else (places, np.full(len(steps), 2.0**at))
    figure.add_scatter(
        x=x,
        y=numbers(y),
        mode="lines" if strokes else "markers",
        line={"color": hue, "width": 1.6},
        marker={"symbol": "x", "size": 8, "color": hue},
        name=name,
        hovertemplate=f"step %{{x:,}}: {name}<extra></extra>",
    )


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
    figure = go.Figure()
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
    if len(skipped):
        figure.add_scatter(
            x=numbers(skipped["step"]),
            y=numbers(skipped["loss_scale"]),
            mode="markers",
            marker={"symbol": "x", "size": 8, "color": colour("skipped", dark)},
            name="skipped step",
            customdata=_stories(skipped["step"].to_numpy(), episodes),
            hovertemplate="step %{x:,}: skipped<br>%{customdata}<extra></extra>",
        )
    put(figure, xaxis={"title": "step", "range": _steps_shown(trace)})
    put(figure, yaxis={"title": "loss scale", **log2_axis(low - room, high + room)})
    first, last = trace["loss_scale"].iloc[0], trace["loss_scale"].iloc[-1]
    alt = f"Loss scale over {len(trace):,} steps, from {first:g} to {last:g}, with {len(skipped):,} skipped steps."
    return finished(figure, title, alt)


def _band(figure: go.Figure, window: pd.DataFrame, low: float, high: float, dark: bool) -> tuple[float, float]:
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


def _steps_shown(trace: pd.DataFrame) -> list[float]:
    """The axis from the first step to the last, without the room that plotly adds for markers."""
    first, last = float(trace["step"].iloc[0]), float(trace["step"].iloc[-1])
    room = max(0.5, 0.01 * (last - first))
    return [first - room, last + room]


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
