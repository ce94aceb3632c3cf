"""Curves over the steps of a run: loss, gradient norm, memory.

>>> loss_figure(loss_curves([run_fp32, run_fp16], max_points=4000))
>>> grad_norm_figure(downsample(scale_trace(run), "step", "grad_norm", keep="skipped"))
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from amp_core.figures.axes import log2_axis, log2_range, shorten
from amp_core.figures.colours import DASHES, colour, run_colours, with_opacity
from amp_core.figures.figure_spec import FigureSpec
from amp_core.figures.marks import MAX_CROSSES
from amp_core.figures.shapes import NO_Y, STROKES, bridge_gaps, compact_array, stroke_points, vertical_line
from amp_core.figures.style import empty_figure, finish, set_layout
from amp_core.text.formatting import number

_DELTA_PX = 130
"""Height of the panel of differences."""
_DELTA_REACH = 1.25
_X_TITLES = {"step": "step", "samples": "samples seen", "time_s": "time since the start (s)"}


def loss_figure(
    curves: pd.DataFrame,
    dark: bool = False,
    log: bool = False,
    title: str = "Loss",
    band: pd.DataFrame | None = None,
    delta: pd.DataFrame | None = None,
    hues: Mapping[str, str] | None = None,
) -> go.Figure:
    """The loss of each run: as recorded (thin) and smoothed (thick), from `loss_curves`.

    `hues` are the colours of runs (`run_colours`); runs of one recipe also differ in their dashes. Behind the curves is
    the noise band of the first recipe, if `band` (from `noise_band`) has any. A second panel has the difference from
    the baseline, if `delta` (from `loss_difference`) has any. A dotted line marks the first step at which a loss is
    not finite.
    """
    if not len(curves):
        return empty_figure(title, "No loss was recorded yet.")
    x = next(c for c in _X_TITLES if c in curves.columns)
    figure = FigureSpec()
    groups = [(str(run), curve) for run, curve in curves.groupby("run", sort=False)]
    hues = run_colours(curves, dark) if hues is None else hues
    if band is not None and len(band):
        _noise(figure, band[x], band["low"], band["high"], hues[groups[0][0]])
    for run, curve in groups:  # below all thick lines
        figure.add_scatter(
            x=compact_array(curve[x]),
            y=compact_array(curve["loss"]),
            mode="lines",
            line={"color": with_opacity(hues[run], 0.4 if len(groups) < 3 else 0.22), "width": 1},
            name=f"{shorten(run)} (recorded)",
            legendgroup=run,
            showlegend=False,
            hoverinfo="skip",
        )
    used: dict[object, int] = {}
    lines: dict[str, dict[str, Any]] = {}
    descriptions = []
    for run, curve in groups:
        recipe = curve["precision"].iloc[0]
        lines[run] = {"color": hues[run], "width": 2.2, "dash": DASHES[used.get(recipe, 0) % len(DASHES)]}
        used[recipe] = used.get(recipe, 0) + 1
        name = shorten(run)
        figure.add_line(
            curve[x],
            curve["smooth"],
            lines[run],
            name=name,
            legendgroup=run,
            customdata=compact_array(curve["loss"]),
            hovertemplate="loss %{customdata:.4g}, smoothed %{y:.4g}",
        )
        broken = np.flatnonzero(~np.isfinite(curve["loss"].to_numpy()))
        if len(broken):
            at = float(curve[x].iloc[broken[0]])
            figure.add_shape(vertical_line(at, line={"color": colour("overflow", dark), "width": 1.5, "dash": "dot"}))
            figure.add_annotation(
                x=at, y=1, yref="paper", text=f"{name}: not finite", showarrow=False, xanchor="right", yanchor="top"
            )
            descriptions.append(f"the loss of {run} is not finite from {x} {at:g} on")
        else:
            descriptions.append(f"{run} goes from {number(curve['loss'].iloc[0])} to {number(curve['loss'].iloc[-1])}")
    set_layout(figure, xaxis={"title": _X_TITLES[x], "range": step_range(curves[x])})
    set_layout(figure, yaxis={"title": "loss", "type": "log" if log else "linear"})
    alt = f"Loss over {_X_TITLES[x]}: {'; '.join(descriptions)}."
    if delta is None or not len(delta):
        return finish(figure, title, alt, hovermode="x unified")
    noise = None if band is None or not len(band) else (band, hues[groups[0][0]])
    alt += f" Below, the difference from the baseline: {_add_delta(figure, delta, x, lines, noise)}."
    return finish(figure, title, alt, 360 + _DELTA_PX, hovermode="x unified", hoversubplots="axis")


def _add_delta(
    figure: FigureSpec,
    delta: pd.DataFrame,
    x: str,
    lines: Mapping[str, Mapping[str, Any]],
    noise: tuple[pd.DataFrame, str] | None,
) -> str:
    """A panel below the losses with the differences from the baseline; returns it in words.

    Early differences may be a hundred times as large as those that matter. The axis ends at `_DELTA_REACH` times the
    largest difference after the first tenth of the run, and triangles at its edges mark what lies beyond.
    """
    begun = delta[x] >= delta[x].min() + 0.1 * (delta[x].max() - delta[x].min())
    reach = _DELTA_REACH * float(delta.loc[begun, "delta"].abs().max())
    if noise is not None:
        band, hue = noise
        _noise(figure, band[x], band["low"] - band["middle"], band["high"] - band["middle"], hue, yaxis="y2")
        reach = max(reach, 1.1 * float((band["high"] - band["middle"])[band[x] >= band[x].quantile(0.1)].max()))
    reach = reach if np.isfinite(reach) and reach > 0 else 1.0
    texts = []
    for run, rows in delta.groupby("run", sort=False):
        line = dict(lines[str(run)])
        figure.add_line(
            rows[x], rows["delta"], line | {"width": 1.6}, name=f"Δ {shorten(str(run))}", legendgroup=run,
            showlegend=False, yaxis="y2", hovertemplate="%{y:+.3g} against the baseline",
        )  # fmt: skip
        beyond = rows[rows["delta"].abs() > reach]
        if len(beyond):
            furthest = beyond.loc[[beyond["delta"].abs().idxmax()]]
            side = float(np.sign(furthest["delta"].iloc[0]))
            figure.add_scatter(
                x=compact_array(furthest[x]), y=np.array([side * reach], dtype=np.float32), mode="markers", yaxis="y2",
                name=f"Δ {shorten(str(run))}, beyond the axis", legendgroup=run, showlegend=False, meta=NO_Y,
                marker={"symbol": "arrow-up" if side > 0 else "arrow-down", "size": 9, "color": line["color"]},
                cliponaxis=False, customdata=compact_array(furthest["delta"]),
                hovertemplate="beyond the axis: %{customdata:+.3g}",
            )  # fmt: skip
        last = rows["delta"].dropna()
        texts.append(f"{run} {last.iloc[-1]:+.2g} at the end" if len(last) else f"{run} unknown")
    low = _DELTA_PX / (_DELTA_PX + 230)
    figure.yaxis(domain=[low + 0.05, 1])
    set_layout(
        figure,
        yaxis2={
            "title": "Δ loss", "domain": [0, low - 0.05], "range": [-1.08 * reach, 1.08 * reach], "anchor": "x",
            "nticks": 4, "zeroline": True,
        },
    )  # fmt: skip
    figure.xaxis(anchor="y2")
    return "; ".join(texts)


def _noise(
    figure: FigureSpec, x: "pd.Series[Any]", low: "pd.Series[Any]", high: "pd.Series[Any]", hue: str, **panel: str
) -> None:
    """The band from `low` to `high`, behind everything."""
    line = {"width": 0, "color": hue}
    common = {"x": compact_array(x), "mode": "lines", "line": line, "hoverinfo": "skip", "legendgroup": "noise"}
    name = "noise from seed to seed"
    figure.add_scatter(y=compact_array(low), name=f"{name} (lowest)", showlegend=False, **common, **panel)
    figure.add_scatter(
        y=compact_array(high), fill="tonexty", fillcolor=with_opacity(hue, 0.3), name=name, **common, **panel,
        showlegend=False if panel else None,
    )  # fmt: skip


def grad_norm_figure(trace: pd.DataFrame, dark: bool = False, title: str = "Gradient norm") -> go.Figure:
    """The unscaled 2-norm of all gradients per step, from `scale_trace`, on a log2 axis.

    A step whose norm is not finite is a cross on the upper edge.
    """
    limits = log2_range(trace["grad_norm"].to_numpy()) if len(trace) else None
    bad = ~np.isfinite(trace["grad_norm"].to_numpy(dtype=np.float64)) & trace["skipped"].to_numpy(dtype=bool)
    if limits is None and not bad.any():
        return empty_figure(title, "No gradient norm was recorded yet.")
    low, high = limits or (-1.0, 0.0)
    padding = max(1.0, 0.06 * (high - low))
    figure = FigureSpec()
    steps, norm = bridge_gaps(trace["step"], trace["grad_norm"].where(np.isfinite(trace["grad_norm"])))
    figure.add_line(
        steps,
        norm,
        {"color": colour("norm", dark), "width": 1.6},
        name="gradient norm",
        hovertemplate="step %{x:,}: length of the whole gradient %{y:.3g}<extra></extra>",
    )
    top = high + 1.5 * padding
    if bad.any():
        add_edge_crosses(figure, trace["step"][bad], high + padding, top, "not finite: step skipped", dark)
    set_layout(figure, xaxis={"title": "step", "range": step_range(trace["step"])})
    set_layout(figure, yaxis={"title": "gradient norm, unscaled", **log2_axis(low - padding, top)})
    alt = f"Gradient norm over {len(trace):,} steps, from 2^{low:.0f} to 2^{high:.0f}; {bad.sum():,} not finite."
    return finish(figure, title, alt)


def memory_figure(
    trace: pd.DataFrame, dark: bool = False, what: str = "held at the step", title: str = "Memory"
) -> go.Figure:
    """Bytes held at each step and the highest so far, from `memory_trace`; `what` is `memory_description(run)`."""
    if not len(trace):
        return empty_figure(title, "No memory was recorded yet.")
    top = float(trace[["allocated_bytes", "peak_bytes"]].max().max())  # of some imported runs one is not known
    size, unit = (2.0**30, "GiB") if top >= 2**30 else (2.0**20, "MiB")
    hue = colour("memory", dark)
    figure = FigureSpec()
    shapes = (
        ("peak_bytes", "highest so far", {"color": hue, "width": 1.4, "dash": "dot", "shape": "hv"}, None),
        ("allocated_bytes", "at the step", {"color": hue, "width": 2, "shape": "hv"}, "tozeroy"),
    )
    for column, name, line, fill in shapes:
        figure.add_line(
            trace["step"],
            trace[column] / size,
            line,
            fill=fill,
            fillcolor=with_opacity(hue, 0.12),
            name=name,
            hovertemplate=f"%{{y:,.3~r}} {unit} held",
        )
    set_layout(figure, xaxis={"title": "step", "range": step_range(trace["step"])})
    set_layout(figure, yaxis={"title": f"memory ({unit})", "range": [0, 1.1 * top / size]})
    alt = f"Memory, {what}, over {len(trace):,} steps; highest {number(top / size, unit)}."
    return finish(figure, f"{title}: {what}", alt, hovermode="x unified")


def add_edge_crosses(figure: FigureSpec, steps: "pd.Series[Any]", at: float, top: float, name: str, dark: bool) -> None:
    """A cross for each step at 2^`at`, or, if crosses would overlap, a stroke down from the edge 2^`top`."""
    hue = colour("skipped", dark)
    places, strokes = compact_array(steps), len(steps) > MAX_CROSSES
    x, y = stroke_points(places, 2.0 ** (top + 4), 2.0**at) if strokes else (places, np.full(len(steps), 2.0**at))
    figure.add_scatter(
        x=x,
        y=compact_array(y),
        mode="lines" if strokes else "markers",
        line={"color": hue, "width": 1},
        marker={"symbol": "x", "size": 8, "color": hue},
        name=name,
        meta=STROKES if strokes else NO_Y,
        hovertemplate=f"step %{{x:,}}: {name}<extra></extra>",
    )


def cell_edges(steps: np.ndarray) -> list[float]:
    """The axis from the left edge of a heatmap's first cell to the right edge of its last; `steps` rise. For narrow
    cells slightly wider, so that a mark on the first or the last step is complete."""
    if len(steps) < 2:
        return [float(steps[0]) - 0.5, float(steps[0]) + 0.5]
    padding = 0.01 * (steps[-1] - steps[0])
    return [
        float(steps[0] - max(padding, 0.5 * (steps[1] - steps[0]))),
        float(steps[-1] + max(padding, 0.5 * (steps[-1] - steps[-2]))),
    ]


def step_range(x: "pd.Series[Any]") -> list[float]:
    """The axis from the first step to the last, without the padding that plotly adds for markers, so that the steps of
    figures below each other align."""
    first, last = float(x.min()), float(x.max())
    padding = 0.01 * (last - first) if last > first else 0.5
    return [first - padding, last + padding]
