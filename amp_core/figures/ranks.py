"""The ranks of a distributed training side by side.

>>> rank_figure(rank_table(run))
>>> rank_scale_figure(rank_scales(run))  # where they disagree
"""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from amp_core import phases
from amp_core.figures.axes import log2_axis, log2_range, power_of_two
from amp_core.figures.colours import DASHES, PAGE, PARTS, PHASES, UNKNOWN_PART, colour, hatching
from amp_core.figures.figure_spec import FigureSpec
from amp_core.figures.shapes import compact_array
from amp_core.figures.step_time import PHASE_NAMES
from amp_core.figures.style import empty_figure, finish
from amp_core.text.formatting import number

_TITLE = "Where each rank's step goes"
_MAX_BARS = 64
"""Most bars that are readable; of more ranks the slowest are drawn."""
_MIN_LABELLED_FRAC = 0.15
"""Parts longer than this share of the longest bar have a label."""
_MIN_REST_FRAC = 0.02
"""Share of a step outside of marked phases from which it is drawn."""


def rank_figure(ranks: pd.DataFrame, dark: bool = False) -> go.Figure:
    """One stacked bar per rank with the median time of each phase, from `rank_table`."""
    known = ranks[ranks[list(phases.COLUMNS)].notna().any(axis=1)] if len(ranks) else ranks
    if not len(known):
        return empty_figure(_TITLE, "No step times were recorded yet.")
    if len(known) > _MAX_BARS:
        known = known.nlargest(_MAX_BARS, "step_ms").sort_values("rank")
    names = [f"rank {rank}" for rank in known["rank"]]
    times = {phase: known[f"{phase}_ms"] for phase in phases.PHASES}
    marked = known[list(phases.COLUMNS)].sum(axis=1)
    if ((rest := known["step_ms"] - marked) > _MIN_REST_FRAC * known["step_ms"]).any():  # medians do not add up
        times[phases.OTHER] = rest.clip(lower=0.0)
    longest = float(pd.DataFrame(times).sum(axis=1).max()) or 1.0
    figure = FigureSpec()
    for phase, ms in times.items():
        if not (ms > 0).any():
            continue
        figure.add_bar(
            x=ms.to_numpy(dtype=np.float32),
            y=names,
            name=PHASE_NAMES.get(f"{phase}_ms", phase),
            marker={
                "color": PHASES[phase][dark],
                "line": {"width": 1, "color": PAGE[dark]},
                "pattern": hatching(phase, dark),
            },
            text=[phase if share > _MIN_LABELLED_FRAC else "" for share in ms / longest],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            textfont={"color": PARTS.get(phase, UNKNOWN_PART)[2][dark]},
            hovertemplate=f"%{{y}}: %{{x:,.3~r}} ms of each step go to {phase}<extra></extra>",
        )
    figure.xaxis(title="median time of a step (ms)", rangemode="tozero")
    figure.yaxis(type="category", autorange="reversed", showgrid=False)
    slowest = known.iloc[int(known["step_ms"].fillna(-1.0).to_numpy().argmax())]
    alt = f"{_TITLE}: {len(known)} ranks; rank {slowest['rank']} takes longest with {number(slowest['step_ms'], 'ms')}."
    return finish(figure, _TITLE, alt, 190 + 34 * len(known), barmode="stack", bargap=0.3)


_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "star", "hexagon", "cross")
"""Distinguish ranks, which all have the loss scale's colour."""


def rank_scale_figure(differing: pd.DataFrame, dark: bool = False, title: str = "Where ranks disagree") -> go.Figure:
    """The loss scale of each rank at the steps at which ranks disagree on it or on skipping, from `rank_scales`.

    Ranks differ in symbol and dash; a rank that skipped the step has a cross. With many ranks, the first of each scale.
    """
    limits = log2_range(differing["loss_scale"].to_numpy()) if len(differing) else None
    if limits is None:
        return empty_figure(title, "All ranks have the same loss scale and skip the same steps.")
    shown = list(dict.fromkeys(differing.drop_duplicates(["loss_scale", "skipped"])["rank"]))
    shown = sorted({*shown, *differing["rank"].unique()[: len(_SYMBOLS) - len(shown)]})[: len(_SYMBOLS)]
    figure = FigureSpec()
    for place, rank in enumerate(shown):
        rows = differing[differing["rank"] == rank].drop_duplicates("step")
        hue = colour("scale", dark)
        figure.add_scatter(
            x=compact_array(rows["step"]),
            y=compact_array(rows["loss_scale"]),
            mode="lines+markers",
            line={"color": hue, "width": 1.2, "dash": DASHES[place % len(DASHES)], "shape": "hv"},
            marker={"color": hue, "size": 9, "symbol": f"{_SYMBOLS[place]}-open"},
            name=f"rank {rank}",
            customdata=[power_of_two(value) for value in rows["loss_scale"]],
            hovertemplate=f"step %{{x:,}}: rank {rank} multiplies its loss by %{{customdata}}<extra></extra>",
        )
    skipped = differing[differing["skipped"] & differing["rank"].isin(shown)]
    if len(skipped):
        hue = colour("skipped", dark)
        figure.add_scatter(
            x=compact_array(skipped["step"]),
            y=compact_array(skipped["loss_scale"]),
            mode="markers",
            marker={"color": hue, "size": 8, "symbol": "x"},
            name="skipped step",
            customdata=skipped["rank"].tolist(),
            hovertemplate="step %{x:,}: rank %{customdata} skipped, others did not<extra></extra>",
        )
    low, high = limits
    figure.xaxis(title="step")
    figure.yaxis(title="loss scale", **log2_axis(low - 1, high + 1))
    steps = differing["step"].nunique()
    alt = f"Loss scales of {differing['rank'].nunique()} ranks at {steps:,} steps at which they disagree, "
    return finish(figure, title, f"{alt}{len(skipped):,} of them skipped.", 320)
