"""How much each row of a table differs from the baseline, with the baseline's noise.

>>> difference_figure(update_changes([fp32, bf16]), "fp32", "difference (percentage points)", percent=True)
"""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from amp_core.figures.axes import tick_names
from amp_core.figures.colours import colour, with_opacity
from amp_core.figures.figure_spec import FigureSpec
from amp_core.figures.shapes import ORNAMENT, compact_array, error_bars, vertical_line
from amp_core.figures.style import empty_figure, finish
from amp_core.text.formatting import number

MAX_ROWS = 12


def difference_figure(
    changes: pd.DataFrame,
    baseline: str,
    axis: str,
    dark: bool = False,
    title: str = "Difference from the baseline",
    *,
    percent: bool = False,
) -> go.Figure:
    """A dot per row at its change from the run `baseline`, over a bar for the noise around zero; hollow within it.

    `changes` has name and the columns of `mean_changes`, the largest change first; at most `MAX_ROWS` are drawn. With
    `percent`, shares (0–1) are drawn in percentage points. `axis` is the title of the x axis.
    """
    if not len(changes):
        return empty_figure(title, f"No step was recorded in both this run and {baseline}.")
    total = len(changes)
    shown = changes.head(MAX_ROWS)
    title = title if total == len(shown) else f"{title}, {MAX_ROWS} largest of {total:,}"
    factor, unit = (100.0, " %") if percent else (1.0, "")
    names = shown["name"].tolist()
    change, noise = (factor * shown[column].to_numpy(dtype=float) for column in ("change", "noise"))
    hue, grey = colour("norm", dark), colour("limit", dark)
    known = np.isfinite(noise)
    figure = FigureSpec()
    figure.add_scatter(
        x=np.where(known, 0.0, np.nan).astype(np.float32),
        y=names,
        mode="markers",
        marker={"color": "rgba(0,0,0,0)", "size": 1},
        error_x=error_bars(np.zeros(len(noise)), -noise, noise, with_opacity(grey, 0.35), 9, 0),
        name=f"noise of {baseline}",
        meta=ORNAMENT,
        showlegend=False,
        hoverinfo="skip",
    )
    # Plotly draws no error bars in a legend.
    legend = {"symbol": "square", "size": 10, "color": with_opacity(grey, 0.35)}
    figure.add_scatter(
        x=np.full(1, np.nan, dtype=np.float32),
        y=names[:1],
        mode="markers",
        marker=legend,
        name=f"noise of {baseline}",
        meta=ORNAMENT,
        hoverinfo="skip",
    )
    figure.add_scatter(
        x=compact_array(change),
        y=names,
        mode="markers",
        marker={"color": hue, "size": 9, "symbol": ["circle" if out else "circle-open" for out in shown["outside"]]},
        name="difference (hollow: within the noise)",
        text=[
            f"{number(factor * row['value'])}{unit}, {baseline} {number(factor * row['baseline'])}{unit}"
            + (f" ± {number(factor * row['noise'], digits=2)}{unit}" if row["noise"] == row["noise"] else "")
            for row in shown.to_dict("records")
        ],
        hovertemplate="%{y}: %{text}<extra></extra>",
    )
    figure.add_shape(vertical_line(0.0, line={"color": grey, "width": 1, "dash": "dot"}))
    figure.xaxis(title=axis, zeroline=False)
    figure.categories(names, tick_names(names))
    alt = (
        f"{title}: {int(changes['outside'].sum()):,} of {total:,} rows differ from {baseline} by more than its noise; "
        f"the largest difference is {number(change[0])}{unit}, of {names[0]}."
    )
    return finish(figure, title, alt, min(1400, 150 + 26 * len(names)))
