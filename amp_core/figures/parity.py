"""Parity: deviations of the final loss compared with the noise over seeds, and agreement of gradients.

>>> deviation_figure(compare(runs).recipes)
>>> agreement_figure(gradient_agreement(runs))
"""

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from amp_core.analysis.comparison.parity import NOISE_STDS
from amp_core.figures.axes import shorten, tick_names
from amp_core.figures.colours import colour, run_colours, with_opacity
from amp_core.figures.figure_spec import FigureSpec
from amp_core.figures.shapes import compact_array, error_bars, vertical_line
from amp_core.figures.style import empty_figure, finish, set_layout

_SYMBOLS = ("circle", "diamond", "square", "triangle-up", "x", "cross", "star")


def deviation_figure(
    recipes: pd.DataFrame,
    dark: bool = False,
    title: str = "Deviation of the final loss",
    hues: Mapping[str, str] | None = None,
) -> go.Figure:
    """The deviation of each recipe's final loss in percent of the baseline's, with its 95 % interval; behind it the
    baseline's noise band, if known. From `compare(runs).recipes`; `hues` are the colours of runs (`run_colours`)."""
    known = recipes[np.isfinite(recipes["loss_change_frac"].to_numpy(dtype=np.float64))] if len(recipes) else recipes
    if not len(known):
        return empty_figure(title, "No two recipes have comparable final losses.")
    first = str(recipes["recipe"].iloc[0])
    value, low, high = (100 * known[f"loss_change_{c}"].to_numpy(dtype=np.float64) for c in ("frac", "low", "high"))
    names = known["recipe"].astype(str).tolist()
    noise = 100 * known["noise_frac"].to_numpy(dtype=np.float64)
    noise = noise[np.isfinite(noise)]
    hues = run_colours(recipes, dark) if hues is None else hues
    figure = FigureSpec()
    reach = np.nanmax(np.abs(np.concatenate([value, low, high, NOISE_STDS * noise])))
    if len(noise):
        edge = NOISE_STDS * float(noise.max())
        band = hues[str(recipes["run"].iloc[0])]
        figure.add_shape(
            vertical_line(-edge, edge, fillcolor=with_opacity(band, 0.22), line={"width": 0}, layer="below")
        )
        figure.add_annotation(
            x=0, y=1, yref="paper", yanchor="bottom", showarrow=False,
            text=f"noise of {shorten(first, 20)} from seed to seed, ±{edge:.2g} %",
        )  # fmt: skip
    figure.add_scatter(
        x=compact_array(value),
        y=names,
        mode="markers",
        marker={"size": 11, "color": [hues[str(run)] for run in known["run"]]},
        error_x=error_bars(value, low, high, colour("limit", dark)),
        hovertemplate="%{y}: final loss off by %{x:+.3g} %<extra></extra>",
        showlegend=False,
    )
    figure.add_shape(vertical_line(0, line={"color": colour("limit", dark), "width": 1.2, "dash": "dot"}))
    side = 1.15 * max(float(reach), 0.01)
    figure.xaxis(title=f"% of the final loss of {shorten(first, 20)}; right is worse", range=[-side, side])
    figure.categories(names, [shorten(n, 20) for n in names])
    summary = "; ".join(f"{n} {v:+.2g} %" for n, v in zip(names, value, strict=True))
    noise_summary = f" The noise from seed to seed is ±{NOISE_STDS * noise.max():.2g} %." if len(noise) else ""
    return finish(figure, title, f"{title} against {first}: {summary}.{noise_summary}", 170 + 48 * len(names))


def agreement_figure(
    agreement: pd.DataFrame,
    dark: bool = False,
    title: str = "Gradients against their FP32 replay",
    hues: Mapping[str, str] | None = None,
) -> go.Figure:
    """Relative error of each layer's gradient on a logarithmic axis, one mark per run, from `gradient_agreement`.

    `hues` are the colours of runs (`run_colours`)."""
    error = agreement["rel_error"].to_numpy(dtype=np.float64) if len(agreement) else np.zeros(0)
    known = agreement[np.isfinite(error) & (error > 0)] if len(agreement) else agreement
    if not len(known):
        return empty_figure(title, "None of the runs was audited, or none lost anything.")
    names = list(dict.fromkeys(known["name"]))
    hues = run_colours(known, dark) if hues is None else hues
    figure = FigureSpec()
    for number, (run, rows) in enumerate(known.groupby("run", sort=False)):
        hue = hues[str(run)]
        figure.add_scatter(
            x=compact_array(rows["rel_error"]),
            y=rows["name"].tolist(),
            mode="markers",
            marker={"size": 9, "color": hue, "symbol": _SYMBOLS[number % len(_SYMBOLS)]},
            name=shorten(str(run)),
            customdata=compact_array(rows["cosine"]),
            hovertemplate="%{y}: error %{x:.2g}, cosine %{customdata:.4f}",
        )
    decades = np.log10(known["rel_error"].to_numpy(dtype=np.float64))
    low, high = math.floor(decades.min() - 0.05), math.ceil(decades.max() + 0.05)
    set_layout(
        figure,
        xaxis={
            "type": "log", "title": "norm of the difference over that of the FP32 gradient", "range": [low, high],
            # plotly's own ticks at 2 and 5 do not fit
            "dtick": max(1, -(-(high - low) // 8)), "exponentformat": "power",
        },
    )  # fmt: skip
    figure.categories(names, tick_names(names), showgrid=True)
    worst = known.iloc[int(known["rel_error"].to_numpy(dtype=np.float64).argmax())]
    alt = f"{title}: {len(names)} tensors; the largest error is {worst['rel_error']:.2g}, of {worst['name']}."
    return finish(figure, title, alt, 170 + 22 * len(names))
