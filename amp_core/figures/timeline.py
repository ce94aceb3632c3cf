"""One profiled step over time: kernels by stream, coloured by what they are, below the phases.

>>> timeline_figure(timeline_bars(timeline(run)))
"""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from amp_core.analysis.performance.timeline import PHASE_LANE
from amp_core.figures.axes import shorten
from amp_core.figures.colours import PARTS, PHASES, UNKNOWN_PART, pattern
from amp_core.figures.figure_spec import FigureSpec
from amp_core.figures.style import empty_figure, finish
from amp_core.text.formatting import number, plural

_ORDER = [*PHASES, *PARTS]
_NAME_CHARS = 80


def timeline_figure(bars: pd.DataFrame, dark: bool = False, title: str = "Timeline of a step") -> go.Figure:
    """Horizontal bars of `timeline_bars`, one lane for the phases and one for each stream."""
    if not len(bars):
        return empty_figure(title, "No profiled step has the times of its kernels.")
    lanes = list(dict.fromkeys(sorted(bars["lane"], key=_lane_order)))
    figure = FigureSpec()
    of_phases = bars["lane"] == PHASE_LANE
    kinds = set(zip(of_phases.tolist(), bars["part"].astype(str).tolist(), strict=True))
    for is_phase, part in sorted(kinds, key=lambda kind: (not kind[0], _order(kind[1]))):
        rows = bars[(of_phases == is_phase) & (bars["part"] == part)]
        light, night, _, hatch = PARTS.get(part, UNKNOWN_PART)
        label = f"phase: {part}" if is_phase else rows["label"].iloc[0]
        names = [shorten(str(name), _NAME_CHARS) for name in rows["name"]]
        counts = [f" and {n - 1:,} more" if n > 1 else "" for n in rows["count"]]
        figure.add_bar(
            x=(rows["end_ms"] - rows["start_ms"]).to_numpy(dtype=np.float32),
            base=rows["start_ms"].to_numpy(dtype=np.float32),
            y=rows["lane"].tolist(),
            orientation="h",
            name=label,
            marker={
                "color": night if dark else light,
                # The outline shows kernels that are narrower than a pixel, or of zero duration.
                "line": {"width": 0 if is_phase else 0.8, "color": night if dark else light},
                "pattern": pattern("." if is_phase else hatch, dark, 6, 0.2),
            },
            customdata=[[name + more] for name, more in zip(names, counts, strict=True)],
            hovertemplate=f"{label}: %{{customdata[0]}}<br>from %{{base:,.4~r}} ms for %{{x:,.3~r}} ms<extra></extra>",
        )
    step = bars["step"].iloc[0]
    figure.xaxis(title=f"time since the {'window' if np.isnan(step) else 'step'} began on the device (ms)")
    figure.yaxis(type="category", categoryorder="array", categoryarray=lanes[::-1], showgrid=False)
    whole = "Timeline of the profiled window" if np.isnan(step) else f"Timeline of step {step:.0f}"
    is_copy = bars["part"].eq("copy")
    kernels, copies = (
        int(bars.loc[bars["lane"].ne(PHASE_LANE) & chosen, "count"].sum()) for chosen in (~is_copy, is_copy)
    )
    counted = plural(kernels, "kernel") + (f" and {copies:,} {_copies(copies)}" if copies else "")
    streams = len([lane for lane in lanes if lane != PHASE_LANE])
    length = bars["end_ms"].max() - bars["start_ms"].min()
    alt = f"{whole}: {counted} on {plural(streams, 'stream')} over {number(length, 'ms')}."
    return finish(figure, whole, alt, 240 + 34 * len(lanes), barmode="overlay", bargap=0.2)


def _copies(count: int) -> str:
    return "copy or fill" if count == 1 else "copies and fills"


def _lane_order(lane: str) -> tuple[bool, int, str]:
    return lane != PHASE_LANE, len(lane), lane


def _order(part: str) -> int:
    return _ORDER.index(part) if part in _ORDER else len(_ORDER)
