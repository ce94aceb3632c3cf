"""What the device counted over the run: how busy it was, and how busy its tensor cores and its memory.

>>> device_figure(device_samples(run))
"""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from amp_core.figures.axes import percent
from amp_core.figures.colours import COUNTERS
from amp_core.figures.figure_spec import FigureSpec
from amp_core.figures.shapes import numbers
from amp_core.figures.style import empty, finished

NAMES = {
    "gpu_util_frac": "any kernel ran",
    "sm_active_frac": "multiprocessors active",
    "tensor_active_frac": "tensor cores active",
    "hmma_active_frac": "of those, 16-bit floats",
    "dram_active_frac": "memory moving data",
}
_DASHES = dict(zip(NAMES, ("dash", "solid", "solid", "dot", "dashdot"), strict=True))


def device_figure(samples: pd.DataFrame, dark: bool = False, title: str = "Share of time on the device") -> go.Figure:
    """The shares that the device counts, in percent over time, from `device_samples`."""
    told = [c for c in NAMES if c in samples and np.isfinite(samples[c].to_numpy(dtype=np.float64)).any()]
    if not told:
        return empty(title, "No device was sampled in this run.")
    figure = FigureSpec()
    for column in told:
        hue = COUNTERS[column][dark]
        figure.add_scatter(
            x=numbers(samples["time_s"]),
            y=numbers(100 * samples[column]),
            mode="lines+markers" if len(samples) < 3 else "lines",
            line={"color": hue, "width": 2, "dash": _DASHES[column]},
            marker={"color": hue, "size": 7},
            name=NAMES[column],
            hovertemplate="%{y:.3g} % of the time",
        )
    figure.xaxis(title="time since the start (s)")
    figure.yaxis(title="share of time (%)", range=[0, 104])
    means = ", ".join(f"{NAMES[c]} {percent(float(samples[c].mean()))}" for c in told)
    alt = f"{title}, mean of {len(samples)} samples: {means}."
    return finished(figure, title, alt, hovermode="x unified", showlegend=True)  # of one line too: which share it is
