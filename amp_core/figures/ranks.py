"""The processes of one training beside each other.

>>> rank_figure(rank_table(run))
"""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from amp_core.figures.style import PAGE, PHASES, empty, finished

_PHASES = ("data", "forward", "backward", "optimizer", "watch")
_TITLE = "Where each rank's step goes"
_MOST = 64
"""As many bars as can be told apart; of more ranks the slowest."""
_ROOM = 0.15
"""A part as long as this, of the longest bar, has its name on it."""
_WHITE, _BLACK = "#FFFFFF", "#11181B"
_INK = {"forward": (_WHITE, _WHITE), "optimizer": (_WHITE, _BLACK)} | dict.fromkeys(
    ("data", "backward", "watch"), (_BLACK, _BLACK)
)


def rank_figure(ranks: pd.DataFrame, dark: bool = False) -> go.Figure:
    """One stacked bar per rank with the median time of each phase, from `rank_table`."""
    known = ranks[ranks[[f"{p}_ms" for p in _PHASES]].notna().any(axis=1)] if len(ranks) else ranks
    if not len(known):
        return empty(_TITLE, "No step times were recorded yet.")
    if len(known) > _MOST:
        known = known.nlargest(_MOST, "step_ms").sort_values("rank")
    names = [f"rank {rank}" for rank in known["rank"]]
    longest = float(known[[f"{p}_ms" for p in _PHASES]].sum(axis=1).max()) or 1.0
    figure = go.Figure()
    for phase in _PHASES:
        figure.add_bar(
            x=known[f"{phase}_ms"].to_numpy(dtype=np.float32),
            y=names,
            orientation="h",
            name=phase,
            marker={"color": PHASES[phase][dark], "line": {"width": 1, "color": PAGE[dark]}},
            text=[phase if share > _ROOM else "" for share in known[f"{phase}_ms"] / longest],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            textfont={"color": _INK[phase][dark]},
            hovertemplate=f"%{{y}}: %{{x:.3g}} ms of each step go to {phase}<extra></extra>",
        )
    figure.update_xaxes(title="median time of a step (ms)", rangemode="tozero")
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    slowest = known.iloc[int(known["step_ms"].fillna(-1.0).to_numpy().argmax())]
    alt = f"{_TITLE}: {len(known)} ranks; rank {slowest['rank']} takes longest with {slowest['step_ms']:.3g} ms."
    return finished(figure, _TITLE, alt, 190 + 34 * len(known), barmode="stack", bargap=0.3)
