"""The course of the baseline behind a figure over steps.

>>> with_baseline(grad_norm_figure(trace), baseline_band(scale_trace(fp32), "grad_norm"), "fp32", "fp32")
"""

import math

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from amp_core.figures.axes import log2_axis, shorten
from amp_core.figures.colours import recipe_colour, with_opacity
from amp_core.figures.figure_spec import FigureSpec
from amp_core.figures.margins import legend_px
from amp_core.figures.shapes import compact_array
from amp_core.figures.style import grow_for_legend, set_layout


def with_baseline(
    figure: go.Figure, band: pd.DataFrame, name: str, recipe: str | None, dark: bool = False
) -> go.Figure:
    """A copy of `figure`, whose y axis is logarithmic, with the baseline's quartiles behind its lines.

    `band` is from `baseline_band`: step, low, middle, high. Only positive values are drawn; the axis grows to hold
    them.
    """
    shown = band[(band[["low", "middle", "high"]] > 0).all(axis=1)]
    if not len(shown) or not figure.data:
        return figure
    spec = FigureSpec.from_figure(figure)
    own, spec.data = spec.data, []
    hue = recipe_colour(recipe, dark)
    steps = compact_array(shown["step"])
    edge = {"x": steps, "mode": "lines", "line": {"width": 0, "color": hue}, "hoverinfo": "skip", "showlegend": False}
    spec.add_scatter(y=compact_array(shown["low"]), legendgroup="baseline", **edge)
    fill = {"fill": "tonexty", "fillcolor": with_opacity(hue, 0.25)}
    spec.add_scatter(y=compact_array(shown["high"]), legendgroup="baseline", **edge, **fill)
    spec.add_line(
        shown["step"],
        shown["middle"],
        {"color": hue, "width": 1.4, "dash": "dash"},
        name=f"{shorten(name)}: median, middle half",
        legendgroup="baseline",
        hovertemplate=f"{shorten(name)}: median %{{y:.3g}}<extra></extra>",
    )
    spec.data += own
    low, high = (float(end) / math.log10(2) for end in spec.layout["yaxis"]["range"])
    reach = np.log2([float(shown["low"].min()), float(shown["high"].max())])
    axis = log2_axis(min(low, math.floor(reach[0])), max(high, math.ceil(reach[1])))
    set_layout(spec, yaxis=spec.layout["yaxis"] | axis, showlegend=True)
    grow_for_legend(spec.layout, legend_px(spec.data, always=True) - legend_px(own))
    alt = f"{spec.layout['meta']['alt'].rstrip('.')}; behind it the middle half of {name}."
    set_layout(spec, meta={"alt": alt})
    return spec.to_figure()
