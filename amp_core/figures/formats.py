"""Number formats: their ranges on one axis, and sums that round away.

>>> format_range_figure(format_ranges(), marks=[("0.1", -3.32)])
>>> accumulation_figure(accumulated(Fraction(0), Fraction(1), 3000, FORMATS["fp16"]), "FP16")
"""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from amp_core.figures.axes import raised
from amp_core.figures.colours import colour
from amp_core.figures.figure_spec import FigureSpec
from amp_core.figures.shapes import ORNAMENT, numbers, upright
from amp_core.figures.style import empty, finished


def format_range_figure(
    ranges: pd.DataFrame,
    marks: Sequence[tuple[str, float]] = (),
    dark: bool = False,
    title: str = "Ranges of the formats",
) -> go.Figure:
    """From which power of two to which each format reaches, subnormal values hatched; from `format_ranges`.

    `marks` are numbers to be pointed at, each with a label and log2 of its magnitude.
    """
    if not len(ranges):
        return empty(title, "No format was chosen.")
    names = ranges["label"].tolist()
    low, high = float(ranges["subnormal_low"].min()) - 4, float(ranges["top"].max()) + 4
    figure = FigureSpec()
    for first, last, label, meaning, hatch in (
        ("subnormal_low", "normal_low", "subnormal: fewer bits", "underflow", "/"),
        ("normal_low", "top", "normal: all bits", "healthy", ""),
    ):
        figure.add_bar(
            x=numbers(ranges[last] - ranges[first]),
            base=numbers(ranges[first]),
            y=names,
            orientation="h",
            name=label,
            marker={
                "color": colour(meaning, dark),
                "line": {"width": 0},
                "pattern": {
                    "shape": hatch,
                    "size": 5,
                    "fgcolor": "#11181B" if dark else "#FFFFFF",
                    "fillmode": "overlay",
                },
            },
            customdata=np.stack([ranges[first], ranges[last]], axis=1).astype(np.float32),
            hovertemplate=f"%{{y}}, {label}<br>from 2<sup>%{{customdata[0]:.0f}}</sup> to "
            "2<sup>%{customdata[1]:.0f}</sup><extra></extra>",
        )
    figure.add_scatter(
        x=np.full(len(names), high - 0.5, dtype=np.float32),
        y=names,
        mode="text",
        text=[f"  {r.powers} powers of two, {r.precision_bits} bits" for r in ranges.itertuples()],
        textposition="middle right",
        textfont={"size": 11},
        cliponaxis=False,
        showlegend=False,
        hoverinfo="skip",
        meta=ORNAMENT,
    )
    for row, (label, at) in enumerate(marks):
        inside = min(max(at, low), high)
        off = " (beyond the axis)" if inside != at else ""
        dash = ("solid", "dot")[row % 2]
        figure.add_shape(upright(inside, line={"color": colour("limit", dark), "width": 1.6, "dash": dash}))
        figure.add_annotation(
            x=inside, y=1, yref="paper", yshift=2 + 16 * row, text=f"{label}{off}", showarrow=False,
            xanchor="left" if inside < (low + high) / 2 else "right", yanchor="bottom", font={"size": 11},
        )  # fmt: skip
    ticks = list(range(math.ceil(low / 32) * 32, math.floor(high) + 1, 32))
    figure.xaxis(
        title="magnitude", range=[low, high], tickvals=ticks, ticktext=[raised(k) for k in ticks], zeroline=False
    )
    figure.yaxis(autorange="reversed", type="category", tickvals=names, showgrid=False)
    said = "; ".join(
        f"{r.label} from 2^{r.subnormal_low:.0f} (normal from 2^{r.normal_low:.0f}) to 2^{r.top:.0f}"
        for r in ranges.itertuples()
    )
    return finished(
        figure,
        title,
        f"Ranges of number formats: {said}.",
        180 + 34 * len(names),
        barmode="overlay",
        bargap=0.35,
        margin={"l": 64, "r": 170, "t": 54 + 16 * len(marks), "b": 48},
    )


def accumulation_figure(sums: pd.DataFrame, label: str, dark: bool = False, title: str = "Running sum") -> go.Figure:
    """A sum of many small numbers as the format called `label` keeps it, beside the exact one; from `accumulated`."""
    if not len(sums):
        return empty(title, "Nothing was added.")
    figure = FigureSpec()
    lines = (
        ("exact", "exact", {"color": colour("limit", dark), "width": 1.6, "dash": "dot"}),
        ("stored", f"in {label}", {"color": colour("healthy", dark), "width": 2.4}),
    )
    for column, name, line in lines:
        figure.add_scatter(
            x=numbers(sums["count"]),
            y=numbers(sums[column]),
            mode="lines",
            line=line,
            name=name,
            hovertemplate="sum %{y:.6g}",
        )
    figure.xaxis(title="numbers added")
    figure.yaxis(title="sum")
    stored, exact = sums["stored"].iloc[-1], sums["exact"].iloc[-1]
    alt = f"Running sum of {len(sums) - 1:,} addends: {stored:.6g} in {label}, exactly {exact:.6g}."
    return finished(figure, title, alt.replace("nan", "not a number"), 320, hovermode="x unified")
