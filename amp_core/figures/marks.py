"""Skipped steps and phases of a run, marked along the bottom of a figure over steps.

>>> with_marks(loss_figure(curves), step_marks(run), "step")
>>> with_rows(loss_figure(curves), [(run.name, step_marks(run), recipe_colour("fp16")) for run in runs], "step")
"""

from collections.abc import Iterable

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from amp_core.figures.axes import shorten
from amp_core.figures.colours import colour
from amp_core.figures.figure_spec import FigureSpec
from amp_core.figures.margins import legend_px
from amp_core.figures.shapes import NO_Y, STROKES, compact_array, stroke_points
from amp_core.figures.style import grow_for_legend, legend_top, set_layout

_KINDS = (("skipped", "skipped step", "x-thin", "skipped"), ("change", "phase change", "triangle-up", "limit"))
_APART = {"skipped": 0.76, "change": 0.22}
"""Heights in a strip that has marks of both kinds: in one line a phase change would hide skipped steps."""
_APART_RATIO = 1.6
"""How much higher such a strip is, up to `MAX_STRIP_FRAC` of the plot."""
MAX_STRIP_FRAC = 0.32


ROW_FRAC = 0.05
"""Height of a row of marks, as a share of the plot's, but at least that of a mark."""
MAX_ROWS_WITHIN = 3
"""Rows of marks within the figure's height; each further row makes the figure higher."""
_MARK_PX, _MARGINS_PX = 12, 155
"""Pixels of a mark, and of the margins above and below a plot."""
MAX_CROSSES = 40
"""More skipped steps than this are drawn as strokes of one line: a browser draws one line faster than
many crosses or pieces of a line with gaps."""
_FIRST_AXIS = 9


def with_marks(
    figure: go.Figure,
    marks: pd.DataFrame,
    x: str = "step",
    dark: bool = False,
    label: str | None = None,
    hue: str | None = None,
    row: int = 0,
    row_frac: float | None = None,
) -> go.Figure:
    """A copy of `figure` with a strip of marks from `step_marks` below its plot; `x` is `step`, `samples` or `time_s`.

    The marks have their own axis, so they cover nothing, the range of the figure's values does not change, and
    zooming keeps them. In a figure of several runs each has its own `row`, in the order given, in its colour
    `hue`, with its `label`; `row_frac` is the share of the plot that a row takes.
    """
    if not len(marks) or not figure.data:
        return figure
    marked = FigureSpec.from_figure(figure)
    descriptions, known = [], {trace.get("name") for trace in marked.data}
    axis = _FIRST_AXIS + row
    kinds, steps, descriptions_of_marks = (marks[name].to_numpy(dtype=object) for name in ("kind", "step", "what"))
    place = marks[x].to_numpy(dtype=np.float64)
    both = row_frac is None and set(kinds[~np.isnan(place)]) >= set(_APART)
    for kind, name, symbol, meaning in _KINDS:
        of_kind = (kinds == kind) & ~np.isnan(place)
        if not of_kind.any():
            continue
        shown = hue or colour(meaning, dark)
        at = compact_array(marks[x].to_numpy()[of_kind])
        strokes = kind == "skipped" and len(at) > MAX_CROSSES
        height = _APART[kind] if both else 0.5
        low, high = (0.5, 0.98) if both else (-1.0, 0.9)
        places, heights = stroke_points(at, low, high) if strokes else (at, np.full(len(at), height, dtype=np.float32))
        hover_data, what = steps[of_kind], descriptions_of_marks[of_kind][0]
        if alike := bool((descriptions_of_marks[of_kind] == what).all()):  # a common description is sent once
            hover_data = compact_array(hover_data.astype(np.int64))
        else:
            hover_data = np.stack([hover_data, descriptions_of_marks[of_kind]], axis=1)
        marked.add_scatter(
            x=places,
            y=heights,
            yaxis=f"y{axis}",
            mode="lines" if strokes else "markers",
            line={"color": shown, "width": 1.6},
            marker={"symbol": symbol, "size": 7, "color": shown, "line": {"color": shown, "width": 1.6}},
            name=name,
            showlegend=name not in known,
            meta=STROKES if strokes else NO_Y,
            customdata=np.repeat(hover_data, len(places) // len(at), axis=0),
            hovertemplate=f"{f'{shorten(label)}, ' if label else ''}step "
            + (f"%{{customdata:,}}: {what}" if alike else "%{customdata[0]:,}: %{customdata[1]}")
            + "<extra></extra>",
        )
        descriptions.append(f"{len(at):,} {f'of {label} ' if label else ''}marked as {name}")
    if not descriptions:
        return figure
    layout = marked.layout
    if row_frac is None:
        plot_px = layout["height"] - layout["margin"]["t"] - layout["margin"]["b"]
        row_frac = max(ROW_FRAC, _MARK_PX / max(plot_px, 4 * _MARK_PX))
        row_frac = max(row_frac, min(_APART_RATIO * row_frac, MAX_STRIP_FRAC)) if both else row_frac
    top = row_frac * (row + 1)
    strips = [int(name[5:]) for name, _ in marked.axes() if name[5:].isdigit() and int(name[5:]) >= _FIRST_AXIS]
    marked.xaxis(anchor=f"y{min([axis, *strips])}")  # the lowest strip: not every run has marks
    _raise_panels(marked, top + row_frac / 2)
    alt = f"{layout['meta']['alt'].rstrip('.')}; {', '.join(descriptions)}."
    strip = {"domain": [row_frac * row, top], "range": [0, 1], "visible": False, "fixedrange": True}
    set_layout(marked, meta={"alt": alt}, **{f"yaxis{axis}": strip})
    grow_for_legend(layout, legend_px(marked.data) - legend_px(marked.data[: len(figure.data)]))
    return marked.to_figure()


def _raise_panels(figure: FigureSpec, floor: float) -> None:
    """Move the panels of a figure, which keep their proportions, above `floor`."""
    panels = [(n, axis) for n, axis in figure.axes() if n[0] == "y" and int(n[5:] or 1) < _FIRST_AXIS]
    below = min((axis.get("domain", [0.0])[0] for _, axis in panels), default=0.0)
    for name, axis in panels or [("yaxis", {})]:
        low, high = axis.get("domain", [0.0, 1.0])
        squeezed = [1 - (1 - edge) * (1 - floor) / (1 - below) for edge in (low, high)]
        figure.layout[name] = axis | {"domain": squeezed if floor > below else [low, high]}


def with_rows(
    figure: go.Figure,
    runs: Iterable[tuple[str, pd.DataFrame, str]],
    x: str = "step",
    dark: bool = False,
) -> go.Figure:
    """The marks of several `runs` (name, `step_marks` and colour), one row each, the first lowest.

    A run without marks takes no row. Runs of one recipe have the same colour, so each run has its own row.
    """
    marked = [(name, marks, hue) for name, marks, hue in runs if marks[x].notna().any()]
    if not marked or not figure.data:
        return figure
    spec = FigureSpec.from_figure(figure)
    around = max(_MARGINS_PX, spec.layout["margin"]["t"] + spec.layout["margin"]["b"])  # many runs have a tall legend
    spec.layout["height"] += around - _MARGINS_PX + _MARK_PX * max(0, len(marked) - MAX_ROWS_WITHIN)
    spec.layout["legend"] = spec.layout["legend"] | {"y": legend_top(spec.layout["height"])}
    row_frac, figure = _MARK_PX / (spec.layout["height"] - around), spec.to_figure()
    for row, (name, marks, hue) in enumerate(marked):
        figure = with_marks(figure, marks, x, dark, label=name, hue=hue, row=row, row_frac=row_frac)
    return figure
