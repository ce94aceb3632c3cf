"""The precision map: modules × operators, each cell coloured by the format in which it ran.

>>> precision_figure(precision_cells(run))
"""

import math

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from amp_core.figures.axes import shorten, tick_names
from amp_core.figures.colours import colour, recipe_colour
from amp_core.figures.figure_spec import FigureSpec
from amp_core.figures.margins import more_legend_px
from amp_core.figures.shapes import INVISIBLE_MARKER
from amp_core.figures.style import empty_figure, finish
from amp_core.formats import FORMATS, narrowest_first
from amp_core.text.formatting import number

_OTHER_COLOURS = {"mixed": ("#C9AE6A", "#BFA45F"), "fp64": ("#2B2F33", "#F2F4F5")}
"""Colours of cells that are not recipes, light and dark."""


def precision_figure(cells: pd.DataFrame, dark: bool = False, title: str = "Precision map") -> go.Figure:
    """Modules (down, in the order of their first call) × operators (across), from `precision_cells`.

    Colour and text of a cell are the format; a cross marks cells in FP32 although autocast lists them in 16 bits.
    """
    if not len(cells):
        return empty_figure(title, "No operators of this kind were traced.")
    modules, ops = list(dict.fromkeys(cells["module"])), _columns(cells)
    formats = [name for name in _cell_order() if (cells["ran"] == name).any()]
    row = [modules.index(name) for name in cells["module"]]
    column = [ops.index(name) for name in cells["op"]]
    grid = np.full((len(modules), len(ops)), np.nan, dtype=np.float32)
    grid[row, column] = [formats.index(ran) if ran in formats else np.nan for ran in cells["ran"]]
    words = np.full(grid.shape, "", dtype=object)
    words[row, column] = [
        "" if cross else _format_label(n, short=True) for n, cross in zip(cells["ran"], cells["stayed"], strict=True)
    ]
    hues = [_hue(name, dark) for name in formats]
    names = _module_labels(modules, cells)
    figure = FigureSpec()
    figure.add_heatmap(
        x=ops,
        y=modules,
        z=grid,
        zmin=-0.5,
        zmax=len(formats) - 0.5,
        colorscale=[[edge / len(formats), hue] for i, hue in enumerate(hues) for edge in (i, i + 1)],
        showscale=False,
        text=words,
        textfont={"size": 10},  # larger texts would overlap on a narrow page
        texttemplate="%{text}",  # plotly omits it in cells that are too small
        xgap=2,
        ygap=2 if len(modules) < 80 else 0,
        hoverinfo="skip",
    )
    for name, hue in zip(formats, hues, strict=True):
        figure.add_scatter(  # only for the legend
            x=[None],
            y=[None],
            mode="markers",
            marker={"color": hue, "symbol": "square", "size": 9},
            hoverinfo="skip",
            name="calls differ" if name == "mixed" else f"ran in {_format_label(name)}",
        )
    _add_hover(figure, cells)
    _crosses(figure, cells[cells["stayed"]], dark)
    every = max(1, math.ceil(len(modules) / 60))
    figure.xaxis(
        title="operator", type="category", side="top", tickangle=-50, showgrid=False,
        tickvals=ops, ticktext=[shorten(op, 22) for op in ops],
    )  # fmt: skip
    figure.categories(modules[::every], tick_names(names, 44)[::every], title="module")
    parts = ", ".join(f"{(cells['ran'] == name).sum()} in {_format_label(name)}" for name in formats)
    alt = (
        f"{title}: {len(modules):,} modules by {len(ops):,} operators; of {len(cells):,} cells {parts}; "
        f"{int(cells['stayed'].sum()):,} ran in FP32 though autocast has them in 16 bits."
    )
    height = min(1400, max(344, 236 + 24 * len(modules))) + more_legend_px(figure)
    margin = {"l": 96, "r": 24, "t": 176, "b": 40}
    return finish(figure, title, alt, height, margin=margin)


def _columns(cells: pd.DataFrame) -> list[str]:
    """Operators with the most FLOPs first, then those of the most modules."""
    order = cells.groupby("op", sort=False).agg(flops=("flops", "sum"), modules=("module", "nunique"))
    return [str(op) for op in order.sort_values(["flops", "modules"], ascending=False, kind="stable").index]


def _module_labels(modules: list[str], cells: pd.DataFrame) -> list[str]:
    """Names for the axis, with the number of modules in a folded row."""
    members = cells.groupby("module")["members"].max()
    return [f"{m} × {members[m]}" if members[m] > 1 else m for m in modules]


def _add_hover(figure: FigureSpec, cells: pd.DataFrame) -> None:
    """Add invisible markers with the hover text of each cell."""
    columns = ["module", "op", "ran", "count", "members", "flops", "policy"]
    figure.add_scatter(
        x=cells["op"].tolist(),
        y=cells["module"].tolist(),
        mode="markers",
        marker=INVISIBLE_MARKER,
        hovertext=[_hover_text(*values) for values in cells[columns].itertuples(index=False, name=None)],
        hoverinfo="text",
        showlegend=False,
        name="cells",
    )


def _hover_text(module: str, op: str, ran: str, count: int, members: int, flops: float, policy: str) -> str:
    among = f" in {members:,} modules" if members > 1 else ""
    work = f", {number(flops)} operations" if flops == flops else ""
    decided = f"<br>autocast: {policy}" if policy else ""
    return f"{module}<br>{op}: {_format_label(ran)}, {count:,} calls{among}{work}{decided}"


def _crosses(figure: FigureSpec, stayed: pd.DataFrame, dark: bool) -> None:
    if len(stayed):
        figure.add_scatter(
            x=stayed["op"].tolist(),
            y=stayed["module"].tolist(),
            mode="markers",
            marker={
                "color": colour("overflow", dark),
                "symbol": "x-thin",
                "size": 9,
                "line": {"color": colour("overflow", dark), "width": 3},
            },
            hoverinfo="skip",
            name="FP32, though autocast has it in 16 bits",
            showlegend=True,
        )


def _cell_order() -> list[str]:
    """Values of a cell, narrowest first, with `mixed` between 16 bits and the wider formats."""
    formats = narrowest_first()
    return [*(f.name for f in formats if f.narrow), "mixed", *(f.name for f in formats if not f.narrow)]


def _hue(name: str, dark: bool) -> str:
    return _OTHER_COLOURS[name][dark] if name in _OTHER_COLOURS else recipe_colour(name, dark)


def _format_label(name: str, short: bool = False) -> str:
    if name in FORMATS:
        return FORMATS[name].label if not short else FORMATS[name].kernel_precision.upper()
    return {"mixed": "mix" if short else "mixed"}.get(name, name.upper())
