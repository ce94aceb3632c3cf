"""Memory by category: at the peak, one bar per run, and through a step.

>>> memory_parts_figure(memory_breakdown(run).parts.assign(run=run.name))
>>> memory_moments_figure(memory_moments(run))
"""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from amp_core.analysis.performance.memory_breakdown import CATEGORIES
from amp_core.figures.axes import shorten
from amp_core.figures.colours import MEMORY, colour, hatching, with_opacity
from amp_core.figures.figure_spec import FigureSpec
from amp_core.figures.margins import more_legend_px
from amp_core.figures.shapes import ORNAMENT, compact_array, vertical_line
from amp_core.figures.style import empty_figure, finish
from amp_core.text.formatting import number

_UNITS = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "bytes"))


def _unit(top: float) -> tuple[float, str]:
    return next((size, name) for size, name in _UNITS if top >= size or size == 1.0)


def memory_parts_figure(parts: pd.DataFrame, dark: bool = False, title: str = "Memory at the peak") -> go.Figure:
    """Bars of memory by category, one per `run`, from `memory_breakdown(run).parts`, in a suitable unit."""
    known = parts[np.isfinite(parts["bytes"].to_numpy(dtype=np.float64))] if len(parts) else parts
    if not len(known):
        return empty_figure(title, "No step's memory was recorded in this run.")
    runs = list(dict.fromkeys(known["run"]))
    size, unit = _unit(float(known.groupby("run")["bytes"].sum().max()))
    figure = FigureSpec()
    for category, label in CATEGORIES.items():
        rows = known[known["category"] == category].set_index("run")["bytes"]
        if not len(rows) or not (rows > 0).any():
            continue
        figure.add_bar(
            x=compact_array(rows.reindex(runs).clip(lower=0) / size),
            y=runs,
            name=label,
            marker={"color": MEMORY[category][dark], "line": {"width": 0}, "pattern": hatching(category, dark)},
            hovertemplate=f"%{{y}}: %{{x:,.3~r}} {unit} of {label}<extra></extra>",
        )
    figure.xaxis(title=f"memory ({unit})", rangemode="tozero")
    figure.categories(runs, [shorten(str(run), 24) for run in runs])
    summary = "; ".join(
        f"{run}: "
        + ", ".join(
            f"{r.label} {number(r.bytes / size, unit)}" for r in known[known["run"] == run].itertuples() if r.bytes
        )
        for run in runs
    )
    height = 170 + 56 * len(runs) + more_legend_px(figure)
    alt = f"{title}: {summary}."
    return finish(figure, title, alt, height, barmode="stack", bargap=0.35)


def memory_moments_figure(
    moments: pd.DataFrame, dark: bool = False, title: str = "Memory through a step", tensors_only: bool = False
) -> go.Figure:
    """Memory by category at each moment of a step, stacked, and the peaks in between; from `memory_moments`.

    `tensors_only` leaves out memory that belongs to no tensor: on a CPU that is most of the process.
    """
    if not len(moments):
        return empty_figure(title, "No step's memory was recorded in this run.")
    left_out = {"temporary", "other"} if tensors_only else {"temporary"}
    shown = [c for c in CATEGORIES if c not in left_out and moments[c].notna().any() and moments[c].max() > 0]
    labels = CATEGORIES | ({"other": "allocated"} if shown == ["other"] else {})  # a trace records totals only
    stack = moments[shown].clip(lower=0).fillna(0.0)
    top = float(max(stack.sum(axis=1).max(), 0 if tensors_only else moments["peak_bytes"].max()))
    size, unit = _unit(top)
    figure = FigureSpec()
    texts = _moment_texts(moments)
    x = compact_array(moments["number"])
    for category in shown:
        hue = MEMORY[category][dark]
        figure.add_area(
            x,
            stack[category] / size,
            hue,
            "memory",
            fillpattern=hatching(category, dark),
            name=labels[category],
            hovertemplate=f"%{{y:,.3~r}} {unit} held",
        )
    if not tensors_only:
        figure.add_scatter(
            x=x,
            y=compact_array(moments["peak_bytes"] / size),
            mode="lines",
            line={"color": colour("limit", dark), "width": 1.4, "dash": "dot", "shape": "vh"},
            name="highest in between",
            hovertemplate=f"%{{y:,.3~r}} {unit} held",
        )
    figure.add_scatter(  # the hover text of the moment, once for all traces
        x=x,
        y=compact_array(stack.sum(axis=1) / size),
        mode="lines",
        line={"color": with_opacity(colour("limit", dark), 0.0), "width": 0},
        name="",
        text=texts,
        hovertemplate="%{text}<extra></extra>",
        showlegend=False,
        meta=ORNAMENT,
    )
    last = float(moments["number"].iloc[-1])
    for phase, rows in moments.groupby("phase", sort=False):
        at_end = float(rows["number"].iloc[0]) > 0.9 * last  # then its label is on the left
        line = {"color": colour("limit", dark), "width": 1, "dash": "dot"}
        figure.add_shape(vertical_line(float(rows["number"].iloc[0]), line=line))
        figure.add_annotation(
            x=float(rows["number"].iloc[0]), y=1, yref="paper", text=f" {phase} ", showarrow=False,
            xanchor="right" if at_end else "left", yanchor="bottom",
        )  # fmt: skip
    figure.xaxis(title="moments of the step, in order", range=[0, last])
    figure.yaxis(title=f"memory ({unit})", range=[0, 1.08 * top / size])
    alt = f"{title}: {len(moments)} moments; highest {number(top / size, unit)}, from {', '.join(shown)}."
    return finish(
        figure, title, alt, 430, hovermode="x unified",
        margin={"l": 64, "t": 64, "b": 48},
    )  # fmt: skip


def _moment_texts(moments: pd.DataFrame) -> np.ndarray:
    """Each moment in words for the hover."""
    pairs = zip(moments["moment"].astype(str), moments["name"].fillna("").astype(str), strict=True)
    return np.array([f"{moment} {name}".strip() for moment, name in pairs], dtype=object)
