"""Skipped steps and phases of a run, marked along the bottom of a figure over steps.

>>> with_marks(loss_figure(curves), step_marks(run), "step")
>>> with_rows(loss_figure(curves), [(run.name, step_marks(run), recipe_colour("fp16")) for run in runs], "step")
"""

from collections.abc import Iterable

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from amp_core.figures.axes import shortened
from amp_core.figures.colours import colour
from amp_core.figures.figure_spec import FigureSpec
from amp_core.figures.margins import legend_px
from amp_core.figures.shapes import NO_Y, STROKES, comb, numbers
from amp_core.figures.style import put

_KINDS = (("skipped", "skipped step", "x-thin", "skipped"), ("change", "phase change", "triangle-up", "limit"))


ROW = 0.05
"""Height of a row of marks, as a share of the plot's, but no lower than a mark, which it would cut off."""
ROWS = 3
"""Rows of marks below the curves; each further one makes the figure higher, so that the curves keep their room."""
_MARK, _AROUND = 12, 155
"""Pixels of a mark, and of what stands above and below the plot of a figure."""
MANY = 40
"""More skipped steps than this stand so close that they are strokes of one line: a browser draws it at once, where
each cross, and each piece of a line with gaps, takes its time."""
_FIRST_AXIS = 9


def with_marks(
    figure: go.Figure,
    marks: pd.DataFrame,
    x: str = "step",
    dark: bool = False,
    of: str | None = None,
    hue: str | None = None,
    row: int = 0,
    each: float | None = None,
) -> go.Figure:
    """`figure` once more, with a strip of marks from `step_marks` below its plot; `x` is `step`, `samples` or `time_s`.

    They stand on an axis of their own, so they cover nothing, the range of the figure's own values does not move, and
    zooming keeps them. In a figure of several runs each has a `row` of its own, the first given first, in its colour
    `hue`, under its name `of`; `each` is the share of the plot that a row takes.
    """
    if not len(marks) or not figure.data:
        return figure
    marked = FigureSpec.of(figure)
    said, known = [], {trace.get("name") for trace in marked.data}
    axis = _FIRST_AXIS + row
    kinds, steps, whats = (marks[name].to_numpy(dtype=object) for name in ("kind", "step", "what"))
    place = marks[x].to_numpy(dtype=np.float64)
    for kind, name, symbol, meaning in _KINDS:
        of_kind = (kinds == kind) & ~np.isnan(place)
        if not of_kind.any():
            continue
        shown = hue or colour(meaning, dark)
        at = numbers(marks[x].to_numpy()[of_kind])
        strokes = kind == "skipped" and len(at) > MANY
        places, heights = comb(at, -1.0, 0.9) if strokes else (at, np.full(len(at), 0.5, dtype=np.float32))
        told, what = steps[of_kind], whats[of_kind][0]
        if alike := bool((whats[of_kind] == what).all()):  # one word for all is sent once
            told = numbers(told.astype(np.int64))
        else:
            told = np.stack([told, whats[of_kind]], axis=1)
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
            customdata=np.repeat(told, len(places) // len(at), axis=0),
            hovertemplate=f"{f'{shortened(of)}, ' if of else ''}step "
            + (f"%{{customdata:,}}: {what}" if alike else "%{customdata[0]:,}: %{customdata[1]}")
            + "<extra></extra>",
        )
        said.append(f"{len(at):,} {f'of {of} ' if of else ''}marked as {name}")
    if not said:
        return figure
    layout = marked.layout
    each = each or max(ROW, _MARK / max(layout["height"] - _AROUND, 4 * _MARK))
    top = each * (row + 1)
    strips = [int(name[5:]) for name, _ in marked.axes() if name[5:].isdigit() and int(name[5:]) >= _FIRST_AXIS]
    marked.xaxis(anchor=f"y{min([axis, *strips])}")  # the lowest there is: not every run has marks
    marked.yaxis(domain=[max(top + each / 2, layout.get("yaxis", {}).get("domain", [0.0])[0]), 1])
    alt = f"{layout['meta']['alt'].rstrip('.')}; {', '.join(said)}."
    strip = {"domain": [each * row, top], "range": [0, 1], "visible": False, "fixedrange": True}
    put(marked, meta={"alt": alt}, **{f"yaxis{axis}": strip})
    layout["margin"]["b"] += legend_px(marked.data) - legend_px(marked.data[: len(figure.data)])
    return marked.made()


def with_rows(
    figure: go.Figure,
    runs: Iterable[tuple[str, pd.DataFrame, str]],
    x: str = "step",
    dark: bool = False,
) -> go.Figure:
    """The marks of several `runs`, each its name, its `step_marks` and its colour, in a row each, the first lowest.

    A run without marks takes no row. Runs of one recipe have one colour, so no two share a row.
    """
    marked = [(name, marks, hue) for name, marks, hue in runs if marks[x].notna().any()]
    if not marked or not figure.data:
        return figure
    drawn = FigureSpec.of(figure)
    around = max(_AROUND, drawn.layout["margin"]["t"] + drawn.layout["margin"]["b"])  # many runs have a high legend
    drawn.layout["height"] += around - _AROUND + _MARK * max(0, len(marked) - ROWS)
    each, figure = _MARK / (drawn.layout["height"] - around), drawn.made()
    for row, (name, marks, hue) in enumerate(marked):
        figure = with_marks(figure, marks, x, dark, of=name, hue=hue, row=row, each=each)
    return figure
