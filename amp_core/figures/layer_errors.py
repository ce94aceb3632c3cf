"""Predicted errors of linear layers in 8 and 4 bits.

>>> layer_error_figure(layer_errors(run, recipes), limit=0.15)
"""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from amp_core.figures.axes import COLORBAR_PX, colorbar_below, tick_names
from amp_core.figures.colours import SHARES, colour, with_opacity
from amp_core.figures.figure_spec import FigureSpec
from amp_core.figures.shapes import INVISIBLE_MARKER
from amp_core.figures.style import empty_figure, finish
from amp_core.quantization import RECIPES

BEST_DB = 60.0
"""Smaller errors have the colour of this one."""


def layer_error_figure(
    errors: pd.DataFrame, limit: float, dark: bool = False, title: str = "Predicted error of linear layers"
) -> go.Figure:
    """Layers (down, the most harmful first) × recipes (across), from `layer_errors`: the error of the worst product.

    Colours change at `limit`, a relative error, and cells beyond it have a cross. A click on a cell reports the layer
    as `y` and the recipe's label as `x`.
    """
    if not len(errors):
        return empty_figure(title, "No product of a linear layer was recorded.")
    order = errors.groupby("layer", sort=False)["rank"].min().sort_values(kind="stable")
    layers, recipes = [str(layer) for layer in order.index], list(dict.fromkeys(errors["format"]))
    labels = [RECIPES[name].label for name in recipes]
    row = [layers.index(name) for name in errors["layer"]]
    column = [recipes.index(name) for name in errors["format"]]
    beyond = errors["rel_error"].to_numpy() > limit
    decibels = np.minimum(errors["rel_error_db"].to_numpy(dtype=float), BEST_DB)
    grid = np.full((len(layers), len(recipes)), np.nan, dtype=np.float32)
    grid[row, column] = -decibels
    words = np.full(grid.shape, "", dtype=object)
    words[row, column] = [f"{db:.1f}{' ✕' if over else ''}" for db, over in zip(decibels, beyond, strict=True)]
    at = -min(-20 * float(np.log10(limit)), BEST_DB)
    low, high = min(float(np.nanmin(grid)), at) - 1, max(float(np.nanmax(grid)), at) + 1
    figure = FigureSpec()
    figure.add_heatmap(
        x=labels,
        y=layers,
        z=grid,
        zmin=low,
        zmax=high,
        colorscale=_scale((at - low) / (high - low), dark),
        colorbar=colorbar_below("error, dB", *_ticks(low, high, at)),
        text=words,
        texttemplate="%{text}",
        textfont={"size": 11},
        xgap=2,
        ygap=2 if len(layers) < 80 else 0,
        hoverinfo="skip",
    )
    figure.add_scatter(
        x=[labels[c] for c in column],
        y=[layers[r] for r in row],
        mode="markers",
        marker=INVISIBLE_MARKER,
        text=[_hover_text(*values) for values in errors[_HOVER].itertuples(index=False, name=None)],
        hovertemplate="%{text}<extra></extra>",
        showlegend=False,
        name="cells",
    )
    figure.add_scatter(  # only for the legend
        x=[None], y=[None], mode="markers", hoverinfo="skip", showlegend=True,
        marker={"color": colour("overflow", dark), "symbol": "square", "size": 9},
        name=f"✕ beyond the limit, {limit:.3g} ({-at:.1f} dB)",
    )  # fmt: skip
    figure.xaxis(title="recipe", type="category", side="top", showgrid=False)
    every = max(1, -(-len(layers) // 60))
    figure.categories(layers[::every], tick_names([name or "the model" for name in layers], 44)[::every], title="layer")
    alt = (
        f"{title}: {len(layers):,} layers by {', '.join(labels)}; {int(beyond.sum()):,} of {len(errors):,} cells are "
        f"beyond the limit of {limit:.3g}."
    )
    height = min(1400, max(300, 174 + 24 * len(layers))) + COLORBAR_PX
    margin = {"l": 96, "r": 24, "t": 96, "b": 24 + COLORBAR_PX}
    return finish(figure, title, alt, height, margin=margin)


_HOVER = ["layer", "format", "rel_error", "rel_error_db", "product", "operand", "rank"]


def _hover_text(layer: str, form: str, error: float, decibels: float, product: str, operand: str, rank: int) -> str:
    worst = f"{product.replace('_', ' ')}, most of it from its {operand.replace('_', ' ')}"
    return (
        f"{layer or 'the model'} in {RECIPES[form].label}<br>relative error {error:.3g} ({decibels:.1f} dB) in {worst}"
        f"<br>number {rank} by predicted harm"
    )


def _scale(limit: float, dark: bool) -> list[list[float | str]]:
    """Shades of one hue up to the limit (0–1 of the scale), of another beyond it."""
    # `stop / 0.6` first: `limit * 0.6 / 0.6` may exceed `limit`, and plotly replaces a scale that does not rise
    mild: list[list[float | str]] = [[limit * (stop / 0.6), hue] for stop, hue in SHARES[dark] if stop <= 0.6]
    over = colour("overflow", dark)
    return [*mild, [limit, with_opacity(over, 0.65)], [1.0, over]]


def _ticks(low: float, high: float, at: float) -> tuple[list[float], list[str]]:
    """Ticks of the colour bar: the limit, and multiples of 10 dB that leave room for it."""
    room = 0.16 * (high - low)
    tens = [float(v) for v in range(int(np.ceil(low / 10)) * 10, int(high) + 1, 10) if abs(v - at) > room]
    ticks = sorted([*tens, at])
    return ticks, [f"limit {-t:.1f}" if t == at else f"{-t:g}" for t in ticks]
