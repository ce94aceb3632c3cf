"""Time and comparison: where a step's time goes, and one number per run as bars.

>>> phase_figure(phase_times(run))
>>> compare_bars(compare(runs).table, "speed_ratio")
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from amp_core.figures.axes import log2_axis, log2_range, shorten
from amp_core.figures.colours import colour, hatching, run_colours
from amp_core.figures.figure_spec import FigureSpec
from amp_core.figures.lines import step_range
from amp_core.figures.shapes import NO_Y, compact_array, error_bars, vertical_line
from amp_core.figures.style import empty_figure, finish
from amp_core.phases import LABELS
from amp_core.schema import RunError
from amp_core.text.formatting import number, scale, share_of

PEAK_RATIO = 4.0
"""Ratio to the median step time above which the axis ends at `CUT_RATIO`, with a mark on such steps."""
CUT_RATIO = 2.4
"""Times the median at which the axis ends: a typical step takes two fifths of the height."""

PHASE_NAMES = {f"{name}_ms": label for name, label in LABELS.items()}
"""Labels of the phases of a step, by column."""


def phase_figure(times: pd.DataFrame, dark: bool = False, title: str = "Time of a step") -> go.Figure:
    """The phases of a step stacked to its time in milliseconds, from `phase_times`."""
    known = [c for c in PHASE_NAMES if c in times and times[c].notna().any() and times[c].max() > 0]
    if not known:
        return empty_figure(title, "No step times were recorded yet.")
    figure = FigureSpec()
    for column in known:
        hue = colour(column.removesuffix("_ms"), dark)
        figure.add_area(
            times["step"],
            times[column].fillna(0.0),
            hue,
            "phases",
            fillpattern=hatching(column.removesuffix("_ms"), dark),
            name=PHASE_NAMES[column],
            hovertemplate="%{y:,.3~r} ms of the step",
        )
        figure.data[-1]["line"] |= {"shape": "hvh"}  # a step has one time, and nothing lies between two steps
    figure.xaxis(title="step", range=step_range(times["step"]))
    figure.yaxis(title="time of a step (ms)", rangemode="tozero")
    total = times[known].sum(axis=1)
    usual, top = float(total.median()), float(total.max())
    if top > PEAK_RATIO * usual:  # one compilation would flatten all other steps
        figure.yaxis(range=[0, CUT_RATIO * usual])
        beyond = total > CUT_RATIO * usual
        figure.add_scatter(
            x=compact_array(times.loc[beyond, "step"]),
            y=np.full(int(beyond.sum()), CUT_RATIO * usual, dtype=np.float32),
            mode="markers",
            marker={"symbol": "triangle-up", "size": 9, "color": colour("limit", dark)},
            cliponaxis=False,
            meta=NO_Y,
            name=f"beyond the axis, up to {number(top, 'ms')}",
            customdata=compact_array(total[beyond]),
            hovertemplate="%{customdata:,.3g} ms in all, beyond the axis<extra></extra>",
        )
    middle = ", ".join(f"{PHASE_NAMES[c]} {number(times[c].median(), 'ms')}" for c in known)
    return finish(
        figure,
        title,
        f"Time of a step by phase, typically: {middle}.",
        400,
        hovermode="x unified",
    )


@dataclass(frozen=True)
class _Bar:
    """How one column of a comparison is shown."""

    title: str
    axis: str
    text: str
    """Text beside the bar, with a placeholder for the number, such as `{} ms`."""
    divisor: float = 1.0
    baseline: float | None = None
    log2: bool = False
    digits: int = 3
    dots: bool = False
    """Dots on an axis around them, with their intervals: differences matter, and 0 is far away."""


_BARS = {
    "speed_ratio": _Bar("Speed", "times as fast as {first}", "{} ×", baseline=1.0),
    "memory_ratio": _Bar("Peak memory", "times the peak of {first}", "{} ×", baseline=1.0),
    "loss_ratio": _Bar("Final loss, common steps", "times that of {first}", "{} ×", baseline=1.0, digits=4),
    "step_ms": _Bar("Time of a step", "median (ms)", "{} ms"),
    "samples_per_s": _Bar("Throughput", "samples per second", "{} /s"),
    "memory_peak_bytes": _Bar("Peak memory", "GiB", "{} GiB", divisor=2.0**30),
    "loss_final": _Bar("Final loss", "loss, mean of the last tenth of the steps", "{}", digits=4, dots=True),
    "energy_j": _Bar("Energy", "J per sample", "{} J"),
    "tensor_frac": _Bar("Tensor cores", "% of GPU time, profiled", "{} %", divisor=0.01),
    "eval_loss": _Bar("Loss on held-out data", "loss", "{}", digits=4, dots=True),
    "skip_frac": _Bar("Skipped steps", "% of steps attempted", "{} %", divisor=0.01),
    "scale_last": _Bar("Last loss scale", "loss scale", "{}", log2=True),
}


def compare_bars(
    table: pd.DataFrame,
    column: str,
    dark: bool = False,
    title: str | None = None,
    hues: Mapping[str, str] | None = None,
) -> go.Figure:
    """One column of `compare(runs).table` as a bar per run, or a dot where the column is a loss, with the interval
    where the table has `<column>_low` and `<column>_high`. Ratios have a line at 1, the first run. `hues` are the
    colours of runs (`run_colours`). Raises `RunError` for a column that cannot be drawn."""
    if column not in _BARS:
        raise RunError(f"column={column!r} cannot be drawn; choose one of {', '.join(_BARS)}")
    bar = _BARS[column]
    title = title or bar.title
    known = table[np.isfinite(table[column].to_numpy(dtype=np.float64))] if len(table) else table
    if not len(known):
        return empty_figure(title, "None of the runs recorded this.")
    value = known[column].to_numpy(dtype=np.float64) / bar.divisor
    low, high = (_side(known, f"{column}_{side}", value, bar.divisor) for side in ("low", "high"))
    spread = bool((high > low).any())
    hues = run_colours(table, dark) if hues is None else hues
    names = known["run"].astype(str).tolist()
    words = [_words(bar, v, a, b) for v, a, b in zip(value, low, high, strict=True)]
    if column == "skip_frac":
        words = [share_of(s, n) for s, n in zip(known["skips"], known["steps"], strict=True)]
    axis = bar.axis.format(first=shorten(str(table["run"].iloc[0]), 20))
    figure = FigureSpec()
    colours = [hues[name] for name in names]
    common = {
        "x": value.astype(np.float32),
        "y": names,
        "name": title,
        "error_x": error_bars(value, low, high, colour("limit", dark)) if spread else None,
        "text": words,
        "hovertemplate": f"%{{y}}, {title.lower()}: %{{text}}, {axis}<extra></extra>",
        "showlegend": False,
    }
    if bar.dots:
        figure.add_scatter(mode="markers", marker={"color": colours, "size": 11}, **common)
    else:
        figure.add_bar(marker={"color": colours, "line": {"width": 0}}, textposition="none", **common)
    under = bar.baseline is not None and (0.5 * bar.baseline < high) & (high < bar.baseline)
    # The spread, and the percentage of a count, are in the hover text.
    counts = [text.partition(" (")[0] for text in words]
    labels = counts if column == "skip_frac" else [bar.text.format(_formatted(bar, v)) for v in value]
    figure.add_labels(
        np.where(under, bar.baseline or 0.0, high),  # no number below the baseline's line
        names,
        [f"{'    ' if bar.dots else '  '}{label}" for label in labels],
    )
    if bar.baseline is not None:
        figure.add_shape(
            vertical_line(bar.baseline, line={"color": colour("limit", dark), "width": 1.2, "dash": "dot"})
        )
    limits = log2_range(value) if bar.log2 else None
    if limits is not None:
        figure.xaxis(**log2_axis(min(0.0, limits[0]) - 1, limits[1] + 1))
    elif bar.dots:
        around = max(0.12 * float(high.max() - low.min()), 0.01 * abs(float(value.mean())), 1e-12)
        figure.xaxis(range=[float(low.min()) - around, float(high.max()) + around])
    else:
        figure.xaxis(range=[0, 1.02 * max(float(high.max()), bar.baseline or 0.0, 1e-12)])
    figure.xaxis(title=axis, nticks=4, tickangle=0)
    figure.categories(names, [shorten(n, 20) for n in names])
    summary = "; ".join(f"{n} {w}" for n, w in zip(names, words, strict=True))
    return finish(
        figure, title, f"{title}: {summary}.", 120 + 44 * len(names), bargap=0.35,
        margin={"l": 64, "r": 76, "t": 52, "b": 48},
    )  # fmt: skip


def _side(table: pd.DataFrame, column: str, value: np.ndarray, divisor: float) -> np.ndarray:
    """One end of the spread; the value itself if it is unknown."""
    if column not in table:
        return value
    end = table[column].to_numpy(dtype=np.float64) / divisor
    return np.where(np.isfinite(end), end, value)


def _words(bar: _Bar, value: float, low: float, high: float) -> str:
    text = bar.text.format(_formatted(bar, value))
    return f"{text} ({_formatted(bar, low)}–{_formatted(bar, high)})" if high > low else text


def _formatted(bar: _Bar, value: float) -> str:
    return scale(value) if bar.log2 else number(value, digits=bar.digits)
