"""Number formats: their ranges on one axis, sums that round away, and a block of values that share a scale.

>>> format_range_figure(format_ranges(), marks=[("0.1", -3.32)])
>>> accumulation_figure(accumulated(Fraction(0), Fraction(1), 3000, FORMATS["fp16"]), "FP16")
>>> block_figure(quantized_values(values, "nvfp4").iloc[:16], "NVFP4")
"""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from amp_core.figures.axes import log2_axis, power_html
from amp_core.figures.colours import bar_marker, colour
from amp_core.figures.figure_spec import FigureSpec
from amp_core.figures.shapes import compact_array, horizontal_line, vertical_line
from amp_core.figures.style import empty_figure, finish


def format_range_figure(
    ranges: pd.DataFrame,
    marks: Sequence[tuple[str, float]] = (),
    dark: bool = False,
    title: str = "Ranges of the formats",
) -> go.Figure:
    """The range of each format in powers of two, subnormals hatched; from `format_ranges`.

    `marks` are numbers to mark, each with a label and log2 of its magnitude.
    """
    if not len(ranges):
        return empty_figure(title, "No format was chosen.")
    names = ranges["label"].tolist()
    low, high = float(ranges["subnormal_low"].min()) - 4, float(ranges["top"].max()) + 4
    figure = FigureSpec()
    for first, last, label, meaning, hatch in (
        ("subnormal_low", "normal_low", "subnormal: fewer bits", "underflow", "/"),
        ("normal_low", "top", "normal: all bits", "healthy", ""),
    ):
        figure.add_bar(
            x=compact_array(ranges[last] - ranges[first]),
            base=compact_array(ranges[first]),
            y=names,
            name=label,
            marker=bar_marker(colour(meaning, dark), hatch, dark),
            customdata=np.stack([ranges[first], ranges[last], ranges["powers"]], axis=1).astype(np.float32),
            hovertemplate=f"%{{y}}, {label}<br>from 2<sup>%{{customdata[0]:.0f}}</sup> to "
            "2<sup>%{customdata[1]:.0f}</sup><br>%{customdata[2]:.0f} powers of two in all<extra></extra>",
        )
    bits = [f"  {bits} bits" for bits in ranges["precision_bits"]]
    figure.add_labels(np.full(len(names), high - 0.5), names, bits, textfont={"size": 11})
    for row, (label, at) in enumerate(marks):
        inside = min(max(at, low), high)
        suffix = " (beyond the axis)" if inside != at else ""
        dash = ("solid", "dot")[row % 2]
        figure.add_shape(vertical_line(inside, line={"color": colour("limit", dark), "width": 1.6, "dash": dash}))
        figure.add_annotation(
            x=inside, y=1, yref="paper", yshift=2 + 16 * row, text=f"{label}{suffix}", showarrow=False,
            xanchor="left" if inside < (low + high) / 2 else "right", yanchor="bottom", font={"size": 11},
        )  # fmt: skip
    ticks = list(range(math.ceil(low / 64) * 64, math.floor(high) + 1, 64))  # closer ones would overlap on a phone
    figure.xaxis(
        title="magnitude", range=[low, high], tickvals=ticks, ticktext=[power_html(k) for k in ticks], zeroline=False
    )
    figure.categories(names)
    summary = "; ".join(
        f"{r.label} from 2^{r.subnormal_low:.0f} (normal from 2^{r.normal_low:.0f}) to 2^{r.top:.0f}"
        for r in ranges.itertuples()
    )
    return finish(
        figure,
        title,
        f"Ranges of number formats: {summary}.",
        180 + 34 * len(names),
        barmode="overlay",
        bargap=0.35,
        margin={"l": 64, "r": 64, "t": 54 + 16 * len(marks), "b": 48},
    )


def accumulation_figure(sums: pd.DataFrame, label: str, dark: bool = False, title: str = "Running sum") -> go.Figure:
    """A sum of many small numbers in the format called `label` and the exact sum; from `accumulated`."""
    if not len(sums):
        return empty_figure(title, "Nothing was added.")
    figure = FigureSpec()
    lines = (
        ("exact", "exact", {"color": colour("limit", dark), "width": 1.6, "dash": "dot"}),
        ("stored", f"in {label}", {"color": colour("healthy", dark), "width": 2.4}),
    )
    for column, name, line in lines:
        figure.add_scatter(
            x=compact_array(sums["count"]),
            y=compact_array(sums[column]),
            mode="lines",
            line=line,
            name=name,
            hovertemplate="sum %{y:.6g}",
        )
    figure.xaxis(title="numbers added")
    figure.yaxis(title="sum")
    stored, exact = sums["stored"].iloc[-1], sums["exact"].iloc[-1]
    alt = f"Running sum of {len(sums) - 1:,} addends: {stored:.6g} in {label}, exactly {exact:.6g}."
    return finish(figure, title, alt.replace("nan", "not a number"), 320, hovermode="x unified")


def block_figure(
    frame: pd.DataFrame, label: str, dark: bool = False, title: str = "Before and after, value by value"
) -> go.Figure:
    """Magnitudes of the values of a block before and after quantization with the recipe called `label`, on a log2 axis;
    from rows of `quantized_values`. Values that become 0 are crosses on the lower edge."""
    nonzero = frame[frame["value"] != 0] if len(frame) else frame
    if not len(nonzero):
        return empty_figure(title, "The block holds zeros only.")
    before, after = (nonzero[name].abs().to_numpy(dtype=np.float64) for name in ("value", "held"))
    lost = after == 0
    smallest = float(nonzero["smallest"].iloc[0])
    least, most = min(before.min(), smallest), max(before.max(), after.max())
    low, high = math.floor(math.log2(least)) - 2.0, math.ceil(math.log2(most)) + 1.0
    figure = FigureSpec()
    for name, values, meaning, symbol, shown in (
        ("before", before, "limit", "circle-open", np.ones_like(lost)),
        ("after", after, "healthy", "circle", ~lost),
        ("becomes 0", np.full(len(after), 2.0 ** (low + 0.5)), "underflow", "x", lost),
    ):
        if shown.any():
            figure.add_scatter(
                x=compact_array(nonzero.index.to_numpy()[shown]),
                y=compact_array(values[shown]),
                mode="markers",
                name=name,
                marker={"color": colour(meaning, dark), "symbol": symbol, "size": 10 if symbol != "circle" else 6},
                customdata=nonzero[["value", "held"]].to_numpy(dtype=np.float32)[shown],
                hovertemplate="value %{x}: %{customdata[0]:.6g} → %{customdata[1]:.6g}<extra></extra>",
            )
    edge = {"color": colour("underflow", dark), "width": 1.4, "dash": "dot"}
    figure.add_shape(horizontal_line(smallest, line=edge))
    figure.xaxis(title="number of the value")
    figure.yaxis(title="magnitude", **log2_axis(low, high))
    alt = (
        f"{title} in {label}: {len(nonzero)} values that are not 0, {int(lost.sum())} of them become 0; the scale is "
        f"{float(nonzero['scale'].iloc[0]):.4g}, the smallest magnitude that is held {smallest:.4g}."
    )
    return finish(figure, f"{title}: {label}", alt, 360)
