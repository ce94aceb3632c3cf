"""Did it learn the same: deviations against the noise of seeds, and agreement of gradients.

>>> deviation_figure(compare(runs).recipes)
>>> agreement_figure(gradient_agreement(runs))
"""

import math

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from amp_core.figures.axes import shortened, tick_names
from amp_core.figures.colours import colour, faded, recipe_colour
from amp_core.figures.figure_spec import FigureSpec
from amp_core.figures.shapes import numbers, upright
from amp_core.figures.style import empty, finished, put

_WITHIN = 2.0
"""The band reaches so many standard deviations, as `amp_core.analysis.comparison.parity` judges."""
_SYMBOLS = ("circle", "diamond", "square", "triangle-up", "x", "cross", "star")


def deviation_figure(
    recipes: pd.DataFrame, dark: bool = False, title: str = "Deviation of the final loss"
) -> go.Figure:
    """The deviation of each recipe's final loss in percent of the reference's, with its 95 % interval; behind it the
    band of the reference's own noise from seed to seed, where that is known. From `compare(runs).recipes`."""
    known = recipes[np.isfinite(recipes["loss_change_frac"].to_numpy(dtype=np.float64))] if len(recipes) else recipes
    if not len(known):
        return empty(title, "No two recipes have final losses that can be held against each other.")
    first = str(recipes["recipe"].iloc[0])
    value, low, high = (100 * known[f"loss_change_{c}"].to_numpy(dtype=np.float64) for c in ("frac", "low", "high"))
    names = known["recipe"].astype(str).tolist()
    noise = 100 * known["noise_frac"].to_numpy(dtype=np.float64)
    noise = noise[np.isfinite(noise)]
    figure = FigureSpec()
    reach = np.nanmax(np.abs(np.concatenate([value, low, high, _WITHIN * noise])))
    if len(noise):
        edge = _WITHIN * float(noise.max())
        band = recipe_colour(recipes["precision"].iloc[0], dark)
        figure.add_shape(upright(-edge, edge, fillcolor=faded(band, 0.22), line={"width": 0}, layer="below"))
        figure.add_annotation(
            x=0, y=1, yref="paper", yanchor="bottom", showarrow=False,
            text=f"noise of {shortened(first, 20)} from seed to seed, ±{edge:.2g} %",
        )  # fmt: skip
    figure.add_scatter(
        x=numbers(value),
        y=names,
        mode="markers",
        marker={"size": 11, "color": [recipe_colour(p, dark) for p in known["precision"]]},
        error_x={
            "type": "data",
            "symmetric": False,
            "array": np.nan_to_num(high - value).astype(np.float32),
            "arrayminus": np.nan_to_num(value - low).astype(np.float32),
            "color": colour("limit", dark),
            "thickness": 1.4,
            "width": 5,
        },
        hovertemplate="%{y}: final loss off by %{x:+.3g} %<extra></extra>",
        showlegend=False,
    )
    figure.add_shape(upright(0, line={"color": colour("limit", dark), "width": 1.2, "dash": "dot"}))
    side = 1.15 * max(float(reach), 0.01)
    figure.xaxis(title=f"% of the final loss of {shortened(first, 20)}; right is worse", range=[-side, side])
    ticks = [shortened(n, 20) for n in names]
    figure.yaxis(autorange="reversed", type="category", tickvals=names, ticktext=ticks, showgrid=False)
    said = "; ".join(f"{n} {v:+.2g} %" for n, v in zip(names, value, strict=True))
    band_said = f" The noise from seed to seed is ±{_WITHIN * noise.max():.2g} %." if len(noise) else ""
    return finished(figure, title, f"{title} against {first}: {said}.{band_said}", 170 + 48 * len(names))


def agreement_figure(
    found: pd.DataFrame, dark: bool = False, title: str = "Gradients against their FP32 replay"
) -> go.Figure:
    """Relative error of each layer's gradient on a logarithmic axis, a mark per recipe, from `gradient_agreement`."""
    error = found["rel_error"].to_numpy(dtype=np.float64) if len(found) else np.zeros(0)
    known = found[np.isfinite(error) & (error > 0)] if len(found) else found
    if not len(known):
        return empty(title, "None of the runs was audited, or none lost anything.")
    names = list(dict.fromkeys(known["name"]))
    figure = FigureSpec()
    for number, (run, rows) in enumerate(known.groupby("run", sort=False)):
        hue = recipe_colour(rows["precision"].iloc[0], dark)
        figure.add_scatter(
            x=numbers(rows["rel_error"]),
            y=rows["name"].tolist(),
            mode="markers",
            marker={"size": 9, "color": hue, "symbol": _SYMBOLS[number % len(_SYMBOLS)]},
            name=shortened(str(run)),
            customdata=numbers(rows["cosine"]),
            hovertemplate="%{y}: error %{x:.2g}, cosine %{customdata:.4f}",
        )
    decades = np.log10(known["rel_error"].to_numpy(dtype=np.float64))
    low, high = math.floor(decades.min() - 0.05), math.ceil(decades.max() + 0.05)
    put(
        figure,
        xaxis={
            "type": "log", "title": "norm of the difference over that of the FP32 gradient", "range": [low, high],
            "dtick": max(1, -(-(high - low) // 8)), "exponentformat": "power",  # plotly's own 2 and 5 have no room
        },
        yaxis={"autorange": "reversed", "type": "category", "tickvals": names, "ticktext": tick_names(names)},
    )  # fmt: skip
    worst = known.iloc[int(known["rel_error"].to_numpy(dtype=np.float64).argmax())]
    alt = f"{title}: {len(names)} tensors; the largest error is {worst['rel_error']:.2g}, of {worst['name']}."
    return finished(figure, title, alt, 170 + 22 * len(names))
