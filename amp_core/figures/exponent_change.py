"""The exponents of one tensor beside those of the baseline.

>>> exponent_change_figure(exponent_changes([fp32, fp16], "output_grad", names=["head"]), "fp32", "fp32")
"""

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from amp_core.figures.axes import exponent_axis, percent, power_html
from amp_core.figures.colours import colour, recipe_colour, with_opacity
from amp_core.figures.figure_spec import FigureSpec
from amp_core.figures.shapes import compact_array
from amp_core.figures.style import empty_figure, finish


def exponent_change_figure(
    changes: pd.DataFrame,
    baseline: str,
    recipe: str | None = None,
    dark: bool = False,
    title: str = "Exponents beside the baseline's",
) -> go.Figure:
    """The share of a tensor's elements with each exponent as a line, over that of the run `baseline` of `recipe` with
    its noise as a band; from `exponent_changes` of one tensor. Exponents outside the noise are marked."""
    if not len(changes):
        return empty_figure(title, f"No step was sampled in both this run and {baseline}.")
    low, high = int(changes["exponent"].min()) - 1, int(changes["exponent"].max()) + 1
    bins = changes.set_index("exponent").reindex(range(low, high + 1))
    shares = 100.0 * bins[["baseline", "value"]].fillna(0.0)
    noise = 100.0 * bins["noise"].fillna(0.0)
    x, hue, own = compact_array(np.arange(low, high + 1) + 0.5), recipe_colour(recipe, dark), colour("norm", dark)
    figure = FigureSpec()
    line = {"x": x, "mode": "lines", "hoverinfo": "skip"}
    edge = line | {"line": {"width": 0, "color": hue, "shape": "hvh"}, "showlegend": False, "legendgroup": "baseline"}
    lower, upper = f"{baseline}, less its noise", f"{baseline}, plus its noise"
    figure.add_scatter(y=compact_array((shares["baseline"] - noise).clip(lower=0.0)), name=lower, **edge)
    fill = {"fill": "tonexty", "fillcolor": with_opacity(hue, 0.3)}
    figure.add_scatter(y=compact_array(shares["baseline"] + noise), name=upper, **edge, **fill)
    named = line | {"name": f"{baseline}, ± noise", "legendgroup": "baseline"}
    dashed = {"color": hue, "width": 1.4, "dash": "dash", "shape": "hvh"}
    figure.add_scatter(y=compact_array(shares["baseline"]), **named | {"line": dashed})
    solid = {"color": own, "width": 2, "shape": "hvh"}
    figure.add_scatter(y=compact_array(shares["value"]), name="this run", **line | {"line": solid})
    beyond = changes[changes["outside"].astype(bool)]
    for rows, name, shown in (
        (changes.drop(beyond.index), "cells", "rgba(0,0,0,0)"),
        (beyond, "outside the noise", own),
    ):
        if len(rows):
            figure.add_scatter(
                x=compact_array(rows["exponent"] + 0.5),
                y=compact_array(100.0 * rows["value"]),
                mode="markers",
                marker={"color": shown, "size": 7},
                name=name,
                showlegend=name != "cells",
                text=[_hover_text(row, baseline) for row in rows.to_dict("records")],
                hovertemplate="%{text}<extra></extra>",
            )
    figure.xaxis(**exponent_axis("magnitude (loss scale taken out)", low, high + 1))
    figure.yaxis(title="share of all elements (%)", rangemode="tozero")
    alt = (
        f"Shares of the elements with each exponent from 2^{low + 1} to 2^{high}, over those of {baseline}: "
        f"{len(beyond):,} of {len(changes):,} differ by more than the noise."
    )
    return finish(figure, title, alt, 340)


def _hover_text(row: Mapping[Hashable, Any], baseline: str) -> str:
    noise = f" ± {percent(row['noise'])}" if row["noise"] == row["noise"] else ""
    span = f"{power_html(int(row['exponent']))} to {power_html(int(row['exponent']) + 1)}"
    return f"{span}: {percent(row['value'])} of all elements, {baseline} {percent(row['baseline'])}{noise}"
