"""Curves over the steps of a run: loss, gradient norm, memory.

>>> loss_figure(loss_curves([run_fp32, run_fp16], most=4000))
>>> grad_norm_figure(thin(scale_trace(run), "step", "grad_norm", keep="skipped"))
"""

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from amp_core.figures.axes import log2_axis, shortened, span
from amp_core.figures.colours import DASHES, colour, faded, recipe_colour
from amp_core.figures.figure_spec import FigureSpec
from amp_core.figures.marks import MANY
from amp_core.figures.shapes import NO_Y, STROKES, comb, mended, numbers, upright
from amp_core.figures.style import empty, finished, put

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
    figure = FigureSpec()
    groups = [(str(run), curve) for run, curve in curves.groupby("run", sort=False)]
    if band is not None and len(band):
        _noise(figure, band, x, recipe_colour(groups[0][1]["precision"].iloc[0], dark))
    for run, curve in groups:  # beneath all the thick ones
        figure.add_scatter(
            x=numbers(curve[x]),
            y=numbers(curve["loss"]),
            mode="lines",
            line={
                "color": faded(recipe_colour(curve["precision"].iloc[0], dark), 0.4 if len(groups) < 3 else 0.22),
                "width": 1,
            },
            name=f"{shortened(run)} (recorded)",
            legendgroup=run,
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
            figure.add_shape(upright(at, line={"color": colour("overflow", dark), "width": 1.5, "dash": "dot"}))
            figure.add_annotation(
                x=at, y=1, yref="paper", text=f"{name}: not finite", showarrow=False, xanchor="right", yanchor="top"
            )
            said.append(f"the loss of {run} is not finite from {x} {at:g} on")
        else:
            said.append(f"{run} goes from {curve['loss'].iloc[0]:.3g} to {curve['loss'].iloc[-1]:.3g}")
    put(figure, xaxis={"title": _X_TITLES[x], "range": first_to_last(curves[x])})
    put(figure, yaxis={"title": "loss", "type": "log" if log else "linear"})
    return finished(figure, title, f"Loss over {_X_TITLES[x]}: {'; '.join(said)}.", hovermode="x unified")


def _noise(figure: FigureSpec, band: pd.DataFrame, x: str, hue: str) -> None:
    """The band from `low` to `high`, behind everything."""
    line = {"width": 0, "color": hue}
    common = {"x": numbers(band[x]), "mode": "lines", "line": line, "hoverinfo": "skip", "legendgroup": "noise"}
    name = "noise from seed to seed"
    figure.add_scatter(y=numbers(band["low"]), name=f"{name} (lowest)", showlegend=False, **common)
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
    figure = FigureSpec()
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
        on_the_edge(figure, trace["step"][bad], high + room, top, "not finite: step skipped", dark)
    put(figure, xaxis={"title": "step", "range": first_to_last(trace["step"])})
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
    figure = FigureSpec()
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
    put(figure, xaxis={"title": "step", "range": first_to_last(trace["step"])})
    put(figure, yaxis={"title": f"memory ({unit})", "range": [0, 1.1 * top / size]})
    alt = f"Memory, {what}, over {len(trace):,} steps; highest {top / size:.3g} {unit}."
    return finished(figure, f"{title}: {what}", alt, hovermode="x unified")


def on_the_edge(figure: FigureSpec, steps: "pd.Series[Any]", at: float, top: float, name: str, dark: bool) -> None:
    """A cross for each step at 2^`at`; of many, which would lie on each other, a stroke from the edge 2^`top` down."""
    hue = colour("skipped", dark)
    places, strokes = numbers(steps), len(steps) > MANY
    x, y = comb(places, 2.0 ** (top + 4), 2.0**at) if strokes else (places, np.full(len(steps), 2.0**at))
    figure.add_scatter(
        x=x,
        y=numbers(y),
        mode="lines" if strokes else "markers",
        line={"color": hue, "width": 1},
        marker={"symbol": "x", "size": 8, "color": hue},
        name=name,
        meta=STROKES if strokes else NO_Y,
        hovertemplate=f"step %{{x:,}}: {name}<extra></extra>",
    )


def outer_edges(steps: np.ndarray) -> list[float]:
    """The axis from the left edge of a heatmap's first cell to the right one of its last; `steps` rise. Of narrow cells
    a little farther, so that a mark on the first or the last step is whole."""
    if len(steps) < 2:
        return [float(steps[0]) - 0.5, float(steps[0]) + 0.5]
    room = 0.01 * (steps[-1] - steps[0])
    return [
        float(steps[0] - max(room, 0.5 * (steps[1] - steps[0]))),
        float(steps[-1] + max(room, 0.5 * (steps[-1] - steps[-2]))),
    ]


def first_to_last(x: "pd.Series[Any]") -> list[float]:
    """The axis from the first step to the last, without the room that plotly adds for markers: so figures below each
    other have their steps below each other."""
    first, last = float(x.min()), float(x.max())
    room = 0.01 * (last - first) if last > first else 0.5
    return [first - room, last + room]
