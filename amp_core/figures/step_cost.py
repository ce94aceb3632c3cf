"""Where the time of a step goes, as one stacked bar per run.

>>> step_cost_figure(step_cost(run).parts)
>>> step_cost_figure(compare_step_cost([run_fp32, run_fp16]))
"""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from amp_core.figures.axes import percent, shorten
from amp_core.figures.colours import PAGE, PARTS, UNKNOWN_PART, pattern
from amp_core.figures.figure_spec import FigureSpec
from amp_core.figures.style import empty_figure, finish
from amp_core.text.formatting import number

_LABEL_CHARS = 75
"""Characters that fit on the longest bar in a column; shorter parts have their label only in the legend."""
_TEXT_PX = 12
_ORDER = list(PARTS)


def step_cost_figure(
    parts: pd.DataFrame, dark: bool = False, title: str = "Where the time of a step goes"
) -> go.Figure:
    """The parts of a step stacked to its time in milliseconds, from `step_cost(run).parts`, or one bar for each run
    from `compare_step_cost`. Parts that were not measured have no length, runs without any no
    bar."""
    if not len(parts) or not (parts["us"] > 0).any():
        return empty_figure(title, "No step times were recorded yet.")
    owner = parts["run"] if "run" in parts else pd.Series("", index=parts.index)
    runs = list(dict.fromkeys(owner[parts["us"] > 0]))
    longest = float(parts.groupby(owner)["us"].sum().max())
    figure = FigureSpec()
    labels = dict(zip(parts["part"].astype(str), parts["label"], strict=True))
    for name in sorted(labels, key=_place):  # in stacking order, also parts that the first run lacks
        label = labels[name]
        rows = parts[parts["part"] == name]
        values = rows.set_index(owner[rows.index])[["us", "frac"]].reindex(runs).fillna(0.0)
        us = values["us"].to_numpy(dtype=np.float64)
        if not (us > 0).any():
            continue
        shares = [percent(share) for share in values["frac"].tolist()]
        light, night, ink, hatch = PARTS.get(name, UNKNOWN_PART)
        figure.add_bar(
            x=(us / 1e3).astype(np.float32),
            y=runs,
            name=label,
            marker={
                "color": night if dark else light,
                "line": {"width": 1, "color": PAGE[dark]},
                "pattern": pattern(hatch, dark, 6, 0.2 if hatch == "." else 0.4),  # dots would hide letters
            },
            text=[_on_bar(label, share, v / longest) for v, share in zip(us, shares, strict=True)],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            textfont={"color": ink[dark], "size": _TEXT_PX},
            customdata=shares,
            hovertemplate=f"{label}: %{{x:,.3~r}} ms, %{{customdata}} of the whole<extra></extra>",
        )
    per = str(parts["per"].iloc[0]) if "per" in parts else "step"
    figure.xaxis(title=f"time of a {per} (ms)", rangemode="tozero")
    figure.categories(runs, [shorten(run, 24) for run in runs])
    summary = "; ".join(f"{run}{': ' if run else ''}{_in_words(parts[owner == run])}" for run in runs)
    return finish(
        figure,
        title,
        f"{title}: {summary}.",
        230 + 70 * len(runs),
        barmode="stack",
        bargap=0.25,
        uniformtext={"mode": "hide", "minsize": _TEXT_PX},  # what does not fit, as on a phone
        margin={"l": 24 if runs == [""] else 64, "t": 52, "b": 48},
    )


def _place(part: str) -> int:
    return _ORDER.index(part) if part in _ORDER else len(_ORDER)


def _on_bar(label: str, share: str, length: float) -> str:
    """The label of a part that takes `length` of the longest bar (0–1)."""
    available = _LABEL_CHARS * length
    return f"{label}<br>{share}" if available >= len(label) else share if available >= len(share) else ""


def _in_words(parts: pd.DataFrame) -> str:
    """The parts of one run in words."""
    known = parts[parts["us"] > 0]
    return ", ".join(f"{label} {number(us / 1e3, 'ms')}" for label, us in zip(known["label"], known["us"], strict=True))
