"""A forecast as ranges. Every title says that it is not measured.

>>> forecast_figure(forecast(traces, ["V100", "A100"]).table, "speedup")
"""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from amp_core.figures.colours import RECIPES, colour, recipe_colour
from amp_core.figures.figure_spec import FigureSpec
from amp_core.figures.shapes import compact_array, error_bars, horizontal_line
from amp_core.figures.style import empty_figure, finish
from amp_core.schema import RunError
from amp_core.text.formatting import number

_SHOWN = {
    "speedup": ("Speed-up over FP32", "times as fast as FP32 with TF32 off", "×"),
    "step_ms": ("Time of a step", "time of a step (ms)", "ms"),
}
_SYMBOLS = ("circle", "square", "diamond", "cross", "x", "triangle-up", "star", "hexagon", "bowtie", "hourglass")
"""Symbols of recipes, in the order of `RECIPES`."""


def forecast_figure(table: pd.DataFrame, column: str = "speedup", dark: bool = False) -> go.Figure:
    """One mark per GPU and recipe, with its own colour and shape, and the range as a line; from
    `forecast(…).table`.

    Raises `RunError` for a column that cannot be drawn.
    """
    if column not in _SHOWN:
        raise RunError(f"column={column!r} cannot be drawn; choose one of {', '.join(_SHOWN)}")
    what, axis, unit = _SHOWN[column]
    title = f"{what}: forecast, not measured"
    known = table[np.isfinite(table[column].to_numpy(dtype=np.float64))] if len(table) else table
    if column == "speedup" and len(known):
        known = known[known["recipe"] != "fp32"]
    if not len(known):
        return empty_figure(title, "None of the GPUs runs any of the recipes.")
    figure = FigureSpec()
    for recipe in [r for r in RECIPES if (known["recipe"] == r).any()]:
        rows = known[known["recipe"] == recipe]
        value = rows[column].to_numpy(dtype=np.float64)
        low, high = (rows[f"{column}_{side}"].to_numpy(dtype=np.float64) for side in ("low", "high"))
        hue = recipe_colour(recipe, dark)
        figure.add_scatter(
            x=rows["gpu"].tolist(),
            y=compact_array(value),
            mode="markers",
            offsetgroup=recipe,
            name=recipe.upper(),
            marker={"color": hue, "size": 11, "symbol": _SYMBOLS[list(RECIPES).index(recipe)]},
            error_y=error_bars(value, low, high, hue, 2, 6),
            hovertext=[
                f"{number(v, unit)}, likely {number(a)} to {number(b)}"
                for v, a, b in zip(value, low, high, strict=True)
            ],
            hovertemplate=f"%{{x}}, %{{fullData.name}}: {what.lower()} %{{hovertext}}, forecast<extra></extra>",
        )
    if column == "speedup":
        figure.add_shape(horizontal_line(1.0, line={"color": colour("limit", dark), "width": 1.2, "dash": "dot"}))
    figure.yaxis(title=axis, rangemode="tozero")
    figure.xaxis(title="GPU", type="category", categoryarray=list(dict.fromkeys(known["gpu"])), categoryorder="array")
    summary = "; ".join(
        f"{row['gpu']} {row['recipe']} {number(row[column], unit)} ({number(row[f'{column}_low'])} to "
        f"{number(row[f'{column}_high'])})"
        for row in known.to_dict("records")
    )
    return finish(figure, title, f"{title}: {summary}.", 360, scattermode="group", scattergap=0.35)
