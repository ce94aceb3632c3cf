"""Tensors × steps: when each tensor becomes subnormal, zero or non-finite.

>>> step_heatmap(shares_over_steps(run, "output_grad"), "subnormal_frac")
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from amp_core.figures.axes import COLORBAR_PX, MIN_DECADES, colorbar_below, percent, power_html, share_ticks, tick_names
from amp_core.figures.colours import SHARES, colour
from amp_core.figures.figure_spec import FigureSpec
from amp_core.figures.lines import cell_edges
from amp_core.figures.shapes import INVISIBLE_MARKER, compact_array
from amp_core.figures.style import empty_figure, finish, set_layout
from amp_core.schema import RunError
from amp_core.text.formatting import number

MAX_CLICKABLE_CELLS = 600
"""Largest number of cells with an invisible marker, since a heatmap's own cells report no clicks; merge steps to stay
below. A browser takes about 0.1 ms for each marker, and cells of a few pixels are hard to hit."""


@dataclass(frozen=True)
class _Column:
    """The texts of one column."""

    bar: str
    about: str
    share_text: str
    """Text after a share."""
    linear: bool = False
    """Whether the colours are those of the shares themselves and not of their logarithms: small shares do not matter.
    """


_COLUMNS = {
    "subnormal_frac": _Column(
        "of nonzero<br>values", "subnormal, of nonzero values", "of its nonzero values subnormal"
    ),
    "zero_frac": _Column("of all<br>elements", "exactly zero, of all elements", "of its elements exactly zero"),
    "absmax": _Column("magnitude,<br>as stored", "largest magnitude, as stored", ""),
    "lost_mass_frac": _Column(
        "of the<br>updates", "lost, of the updates' mass", "of its updates' mass lost", linear=True
    ),
    "unchanged_frac": _Column(
        "of the<br>elements",
        "unchanged, of the elements with an update",
        "of the elements with an update unchanged",
        linear=True,
    ),
    "lost_decay_frac": _Column("of weight<br>decay", "lost, of weight decay", "of its weight decay lost", linear=True),
}


def step_heatmap(
    shares: pd.DataFrame, column: str = "subnormal_frac", dark: bool = False, title: str = "Tensors over steps"
) -> go.Figure:
    """One `column` of `shares_over_steps` or `update_losses_over_steps` for each tensor and step; a cell with infinite
    or NaN values has a star.

    A click on a cell (of at most `MAX_CLICKABLE_CELLS`) reports the tensor as `y` and in `customdata` its name, its
    first and its last step. Raises `RunError` for a column that cannot be drawn.
    """
    if column not in _COLUMNS:
        raise RunError(f"column={column!r} cannot be drawn; choose one of {', '.join(_COLUMNS)}")
    if not len(shares):
        return empty_figure(title, "No tensor was sampled yet.")
    names, steps = list(dict.fromkeys(shares["name"])), np.unique(shares["step"].to_numpy())
    if "nonfinite_frac" not in shares:
        shares = shares.assign(nonfinite_frac=0.0)
    row = pd.Index(names).get_indexer(shares["name"])
    place = np.searchsorted(steps, shares["step"].to_numpy())
    grid = np.full((len(names), len(steps)), np.nan, dtype=np.float32)
    values = shares[column].to_numpy(dtype=np.float64)
    grid[row, place] = _colour_values(values, column)
    figure = FigureSpec()
    figure.add_heatmap(
        x=compact_array(steps),
        y=names,
        z=grid,
        colorscale=[list(stop) for stop in SHARES[dark]],
        colorbar=colorbar_below(_COLUMNS[column].bar, *_bar_ticks(grid, column)),
        **_colour_limits(column),
        ygap=2 if len(names) < 60 else 0,
        hoverinfo="skip",
    )
    bad = shares[shares["nonfinite_frac"] > 0]
    if len(bad):
        hue = colour("overflow", dark)
        figure.add_scatter(
            x=compact_array(bad["step"]),
            y=bad["name"].tolist(),
            mode="markers",
            marker={"symbol": "asterisk", "size": 7, "color": hue, "line": {"color": hue, "width": 1.6}},
            name="holds ∞ or NaN",
            hoverinfo="skip",
        )
    if len(shares) <= MAX_CLICKABLE_CELLS:
        figure.add_scatter(
            x=compact_array(shares["step"]),
            y=shares["name"].tolist(),
            mode="markers",
            marker=INVISIBLE_MARKER,
            customdata=shares[["name", "step", "until"]].to_numpy(dtype=object),
            text=_hover_texts(shares, column),
            hovertemplate="%{text}<extra></extra>",
            showlegend=False,
            name="cells",
        )
    every = max(1, -(-len(names) // 45))
    set_layout(figure, xaxis={"title": "step", "zeroline": False, "showgrid": False, "range": cell_edges(steps)})
    figure.categories(names[::every], tick_names(names)[::every])
    what = _COLUMNS[column].about
    holding = f"; {len(bad):,} cells hold infinities or not-a-number" if not _COLUMNS[column].linear else ""
    alt = f"{title}: {len(names):,} tensors at {len(steps):,} sampled steps, {what}{holding}."
    # On a narrow page the legend takes three lines, which must not squeeze the rows of a few tensors.
    height = min(800, max(260, 210 + 20 * len(names))) + COLORBAR_PX
    return finish(figure, title, alt, height, margin={"l": 96, "t": 52, "b": 48 + COLORBAR_PX})


def _colour_limits(column: str) -> dict[str, int]:
    if column == "absmax":
        return {}
    return {"zmin": 0, "zmax": 1} if _COLUMNS[column].linear else {"zmin": MIN_DECADES, "zmax": 0}


def _colour_values(values: np.ndarray, column: str) -> np.ndarray:
    """The values of the colours: a linear share, log10 of another, log2 of a magnitude; NaN for missing values, and
    for zeros on a logarithmic scale."""
    if _COLUMNS[column].linear:
        return values
    with np.errstate(divide="ignore", invalid="ignore"):
        if column == "absmax":
            return np.where(values > 0, np.log2(values), np.nan)
        return np.where(values > 0, np.maximum(np.log10(values), MIN_DECADES), np.nan)


def _bar_ticks(grid: np.ndarray, column: str) -> tuple[Sequence[float], list[str]]:
    """The ticks of the colour bar and their labels, in the column's unit."""
    if _COLUMNS[column].linear:
        return [0, 0.25, 0.5, 0.75, 1], [f"{share} %" for share in (0, 25, 50, 75, 100)]
    if column != "absmax":
        return share_ticks()
    known = grid[np.isfinite(grid)]
    if not len(known):
        return [0], [power_html(0)]
    low, high = int(np.floor(known.min())), int(np.ceil(known.max()))
    at = list(range(low, high + 1, max(1, -(-(high - low) // 6))))
    return at, [power_html(k) for k in at]


def _hover_texts(shares: pd.DataFrame, column: str) -> list[str]:
    """The hover text of each cell."""
    texts = []
    for row in shares.to_dict("records"):
        value = row[column]
        when = f"step {row['step']:,}" if row["step"] == row["until"] else f"steps {row['step']:,} to {row['until']:,}"
        if value != value:
            text = "no such value"
        elif column == "absmax":
            power = f" (2<sup>{np.log2(value):.1f}</sup>)" if value > 0 else ""
            text = f"largest finite magnitude {number(value)}{power}"
        else:
            text = f"{percent(value)} {_COLUMNS[column].share_text}"
        share = row["nonfinite_frac"]
        broken = f"<br>{percent(share)} of its elements are ∞ or NaN" if share > 0 else ""
        texts.append(f"{row['name']}, {when}<br>{text}{broken}")
    return texts
