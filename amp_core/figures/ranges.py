"""Number ranges: the exponents of each tensor's values.

>>> exponent_heatmap(exponent_shares(run, "output_grad"), formats=("fp16",))

The horizontal axis of the heatmap is log2 of the magnitude: exponent e fills the cell from e to e + 1, so that the
limits of a format are at their exact positions.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from amp_core.figures.axes import (
    COLORBAR_PX,
    MIN_DECADES,
    colorbar_below,
    exponent_axis,
    format_limits,
    percent,
    power_html,
    share_cells,
    tick_names,
)
from amp_core.figures.colours import CHANGES, colour, limit_line, with_opacity
from amp_core.figures.figure_spec import FigureSpec
from amp_core.figures.shapes import INVISIBLE_MARKER, NO_X, vertical_line
from amp_core.figures.style import empty_figure, finish, set_layout
from amp_core.formats import FORMATS, Format

MAX_CELLS = 400_000
"""Most cells that a browser draws without delay; beyond it neighbouring tensors are averaged in one row."""
MAX_CLICKABLE_CELLS = 3000
"""With fewer cells each carries an invisible marker, since a heatmap's own cells report no clicks."""

_LABEL_PX = 15
"""Height of a line of labels in pixels."""
_LINES = 3
"""Lines of labels per format: one per limit."""


def exponent_heatmap(
    shares: pd.DataFrame,
    formats: Sequence[str] = ("fp16",),
    dark: bool = False,
    *,
    title: str = "Number ranges",
    values: str = "value as stored",
    exponents: tuple[int, int] | None = None,
    classes: pd.DataFrame | None = None,
    clickable: bool = True,
) -> go.Figure:
    """Tensors × exponents, from `exponent_shares`: the share of a tensor's nonzero values with each exponent.

    Args:
        shares: columns name, exponent, share.
        formats: names from `amp_core.formats.FORMATS` whose limits are drawn as labelled lines.
        values: what the magnitudes describe, for the axis title, e.g. "gradient times loss scale".
        exponents: fixed range of the axis; by default all of the data and the limits of narrow formats. Give the same
            range to figures that are compared.
        classes: `class_shares` of the same tensors: then tensors without a finite nonzero value have a row too, and
            infinite and NaN values, which have no exponent, are shown at the right edge.

    With `clickable`, which takes a third of the time, a click on a cell (below `MAX_CLICKABLE_CELLS` cells) reports the
    tensor as `y` and in `customdata[0]`, and the exponent in `customdata[1]`.
    """
    if not len(shares):
        return empty_figure(title, "No tensor with finite nonzero values was sampled yet.")
    limits = [FORMATS[f] for f in formats]
    names, grid, lowest = _grid(shares, classes)
    rows = len(names)
    names, grid = _pooled(names, grid)
    clickable = clickable and grid.size < MAX_CLICKABLE_CELLS
    low, high = exponents or _extent(lowest, lowest + grid.shape[1], limits)
    figure = FigureSpec()
    figure.add_heatmap(
        x=np.arange(lowest, lowest + grid.shape[1], dtype=np.float32) + 0.5,
        y=names,
        **share_cells(grid, dark),
        xgap=1 if grid.shape[1] < 80 else 0,
        ygap=2 if len(names) < 60 else 0,
        customdata=(100.0 * grid).astype(np.float32) if not clickable else None,
        hovertemplate="%{y}<br>around 2<sup>%{x}</sup>: %{customdata:.3~r} % of its nonzero values<extra></extra>"
        if not clickable
        else None,
        hoverinfo="skip" if clickable else None,
    )
    if clickable:
        _clickable(figure, names, grid, lowest)
    drawn = [_limit_lines(fmt, low, high, row, dark) for row, fmt in enumerate(limits)]
    set_layout(
        figure,
        shapes=[line for lines, _ in drawn for line in lines] + _zones(limits, low, high, dark),
        annotations=[label for _, labels in drawn for label in labels],
    )
    padding = 24
    if classes is not None and len(names) == rows:
        padding = _show_nonfinite(figure, classes, high, dark)
    set_layout(figure, xaxis=exponent_axis(f"magnitude ({values})", low, high))
    pooled = f" (in {len(names):,} rows)" if len(names) < rows else ""
    alt = (
        f"Heatmap of {rows:,} tensors{pooled} over the magnitudes of their values, from 2^{lowest} to "
        f"2^{lowest + grid.shape[1]}, with the limits of {', '.join(f.label for f in limits) or 'no format'}."
    )
    return _with_rows(figure, names, title, alt, labels_px=_LINES * _LABEL_PX * len(limits), right=padding)


def exponent_change_heatmap(
    changes: pd.DataFrame, baseline: str, dark: bool = False, title: str = "Difference from the baseline"
) -> go.Figure:
    """Tensors × exponents, from `exponent_changes`: by how much the share of a tensor's elements with each exponent
    differs from the run `baseline`. Changes within the baseline's noise are left empty.

    A click on a cell (below `MAX_CLICKABLE_CELLS`) reports the tensor as `y` and in `customdata[0]`, and the exponent
    in `customdata[1]`.
    """
    if not len(changes):
        return empty_figure(title, f"No step was sampled in both this run and {baseline}.")
    beyond = changes[changes["outside"]]
    names, grid, lowest = _grid(changes.assign(share=changes["change"].where(changes["outside"], 0.0)), None)
    rows = len(names)
    names, grid = _pooled(names, grid)
    decades = np.log10(np.maximum(np.abs(grid), 10.0**MIN_DECADES)) - MIN_DECADES
    ends = (2, -MIN_DECADES)
    shares = [f"{100 * 10.0 ** (k + MIN_DECADES):g} %" for k in ends]
    figure = FigureSpec()
    figure.add_heatmap(
        x=np.arange(lowest, lowest + grid.shape[1], dtype=np.float32) + 0.5,
        y=names,
        z=np.where(grid != 0, np.sign(grid) * decades, np.nan).astype(np.float32),
        zmin=MIN_DECADES,
        zmax=-MIN_DECADES,
        colorscale=[list(stop) for stop in CHANGES[dark]],
        colorbar=colorbar_below(
            "of all<br>elements",
            [-ends[1], -ends[0], 0, *ends],
            [f"−{shares[1]}", f"−{shares[0]}", "0", *(f"+{share}" for share in shares)],
        ),
        xgap=1 if grid.shape[1] < 80 else 0,
        ygap=2 if len(names) < 60 else 0,
        hoverinfo="skip",
    )
    if 0 < len(beyond) < MAX_CLICKABLE_CELLS and len(names) == rows:
        figure.add_scatter(
            x=(beyond["exponent"].to_numpy() + 0.5).astype(np.float32),
            y=beyond["name"].tolist(),
            mode="markers",
            marker=INVISIBLE_MARKER,
            customdata=beyond[["name", "exponent"]].to_numpy(dtype=object),
            text=[_change_text(row, baseline) for row in beyond.to_dict("records")],
            hovertemplate="%{text}<extra></extra>",
            showlegend=False,
            name="cells",
        )
    set_layout(figure, xaxis=exponent_axis("magnitude (loss scale taken out)", lowest - 1, lowest + grid.shape[1] + 1))
    alt = (
        f"Heatmap of {rows:,} tensors over the magnitudes of their values: {len(beyond):,} of {len(changes):,} shares "
        f"differ from {baseline} by more than its noise."
    )
    return _with_rows(figure, names, title, alt)


def _change_text(cell: Mapping[Hashable, Any], baseline: str) -> str:
    """The hover text of a cell."""
    noise = f", noise ± {percent(cell['noise'])}" if cell["noise"] == cell["noise"] else ""
    sign = "+" if cell["change"] > 0 else "−"
    return (
        f"{cell['name']}<br>from {power_html(cell['exponent'])} to {power_html(cell['exponent'] + 1)}: "
        f"{percent(cell['value'])} of its elements, {baseline} {percent(cell['baseline'])}<br>"
        f"{sign}{percent(abs(cell['change']))}{noise}"
    )


def _with_rows(
    figure: FigureSpec, names: list[str], title: str, alt: str, *, labels_px: int = 0, right: int = 24
) -> go.Figure:
    """A row of the figure for each name, with `labels_px` for labels above the plot and `right` pixels beside it."""
    every = max(1, math.ceil(len(names) / 45))
    figure.categories(names[::every], tick_names(names)[::every])
    height = min(900, max(280, 150 + 26 * len(names))) + labels_px
    margin = {"l": 96, "r": right, "t": 46 + labels_px, "b": 48 + COLORBAR_PX}
    return finish(figure, title, alt, height, margin=margin)


def _grid(shares: pd.DataFrame, classes: pd.DataFrame | None) -> tuple[list[str], np.ndarray, int]:
    """Names in order, share per name × exponent, and the exponent of the first column."""
    names = pd.Index(shares["name"].unique() if classes is None else classes["name"])
    exponents = shares["exponent"].to_numpy()
    lowest = int(exponents.min())
    grid = np.zeros((len(names), int(exponents.max()) - lowest + 1))
    row = names.get_indexer(shares["name"])
    grid[row[row >= 0], exponents[row >= 0] - lowest] = shares["share"].to_numpy()[row >= 0]
    return [str(n) for n in names], grid, lowest


def _pooled(names: list[str], grid: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Neighbouring rows averaged if there are more than `MAX_CELLS` cells."""
    rows_per_cell = math.ceil(grid.size / MAX_CELLS)
    if rows_per_cell == 1:
        return names, grid
    starts = np.arange(0, len(names), rows_per_cell)
    sizes = np.diff(np.append(starts, len(names)))
    pooled = np.add.reduceat(grid, starts, axis=0) / sizes[:, None]
    return [f"{names[s]} and {n - 1} more" for s, n in zip(starts, sizes, strict=True)], pooled


def _extent(low: int, high: int, limits: Sequence[Format]) -> tuple[int, int]:
    """The axis: all data, and the limits of formats with a narrow range."""
    for fmt in limits:
        if fmt.powers_of_two < 64:
            low, high = min(low, fmt.min_subnormal_exponent - 3), max(high, fmt.max_exponent + 4)
    return low - 1, high + 1


def _clickable(figure: FigureSpec, names: list[str], grid: np.ndarray, lowest: int) -> None:
    row, column = np.nonzero(grid)
    exponent = column + lowest
    text = [
        f"{names[r]}<br>from {power_html(e)} to {power_html(e + 1)}: {percent(s)} of its nonzero values"
        for r, e, s in zip(row.tolist(), exponent.tolist(), grid[row, column].tolist(), strict=True)
    ]
    figure.add_scatter(
        x=(exponent + 0.5).astype(np.float32),
        y=[names[r] for r in row],
        mode="markers",
        marker=INVISIBLE_MARKER,
        customdata=[[names[r], int(e)] for r, e in zip(row, exponent, strict=True)],
        text=text,
        hovertemplate="%{text}<extra></extra>",
        showlegend=False,
        name="cells",
    )


def _show_nonfinite(figure: FigureSpec, classes: pd.DataFrame, high: int, dark: bool) -> int:
    """Show beside the plot how much of a tensor is infinite or NaN, which has no exponent; return the
    pixels that this takes."""
    share = classes["inf_frac"].fillna(0.0) + classes["nan_frac"].fillna(0.0)
    nonfinite = classes[share > 0]
    if not len(nonfinite):
        return 24
    figure.add_labels(
        np.full(len(nonfinite), high),
        nonfinite["name"].tolist(),
        [f" ∞ {percent(s)}" for s in share[share > 0]],
        textfont={"size": 11, "color": colour("overflow", dark)},
        customdata=100.0 * nonfinite[["inf_frac", "nan_frac"]].to_numpy(dtype=np.float32),
        hovertemplate="%{y}: %{customdata[0]:.3~r} % infinite, %{customdata[1]:.3~r} % NaN<extra></extra>",
        hoverinfo=None,
        name="not finite",
        meta=NO_X,
    )
    return 84


def _limit_lines(
    fmt: Format, low: int, high: int, row: int, dark: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The three limits of a format as lines, and their labels above the plot, one below the other: in one row they
    would overlap on a narrow page."""
    inside = [(at, label, line) for line, (at, label) in enumerate(format_limits(fmt)) if low <= at <= high]
    above = {"y": 1, "yref": "paper", "showarrow": False, "yanchor": "bottom", "font": {"size": 11}}
    shift = 2 + _LINES * _LABEL_PX * row
    if not inside:
        reach = f"from {power_html(fmt.min_subnormal_exponent)} to {power_html(fmt.max_exponent + 1)}, beyond this axis"
        text = {"x": 0, "xref": "paper", "yshift": shift, "xanchor": "left", "text": f"{fmt.label} reaches {reach}"}
        return [], [above | text]
    labels = [
        above
        | {
            "x": at,
            "yshift": shift + _LABEL_PX * line,
            "text": f"{fmt.label} {label}",
            "xanchor": "right" if (at - low) / (high - low) > 0.75 else "left",
        }
        for at, label, line in inside
    ]
    return [vertical_line(at, line=limit_line(row, dark)) for at, *_ in inside], labels


def _zones(limits: Sequence[Format], low: int, high: int, dark: bool) -> list[dict[str, Any]]:
    """Tinted zones where the first format underflows, is subnormal, or overflows."""
    if not limits:
        return []
    fmt = limits[0]
    top = math.log2(fmt.max_value)
    zones: list[tuple[float, float, str]] = []
    if low < fmt.min_subnormal_exponent:
        zones.append((low, fmt.min_subnormal_exponent, with_opacity(colour("underflow", dark), 0.14)))
    if low < fmt.min_normal_exponent and fmt.min_subnormal_exponent < high:
        x0 = max(low, fmt.min_subnormal_exponent)
        zones.append((x0, fmt.min_normal_exponent, with_opacity(colour("underflow", dark), 0.06)))
    if high > top:
        zones.append((top, high, with_opacity(colour("overflow", dark), 0.14)))
    return [vertical_line(x0, x1, fillcolor=tint, line={"width": 0}, layer="below") for x0, x1, tint in zones]
