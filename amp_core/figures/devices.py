"""Device counters over the run: activity of the device, its tensor cores and its memory.

>>> device_figure(device_samples(run))
"""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from amp_core.figures.axes import percent
from amp_core.figures.colours import COUNTERS
from amp_core.figures.figure_spec import FigureSpec
from amp_core.figures.style import empty_figure, finish

NAMES = {
    "gpu_util_frac": "any kernel ran",
    "sm_active_frac": "multiprocessors active",
    "tensor_active_frac": "tensor cores active",
    "hmma_active_frac": "of those, 16-bit floats",
    "dram_active_frac": "memory moving data",
}
_DASHES = dict(zip(NAMES, ("dash", "solid", "solid", "dot", "dashdot"), strict=True))


def device_figure(samples: pd.DataFrame, dark: bool = False, title: str = "Share of time on the device") -> go.Figure:
    """The device's counters in percent over time, from `device_samples`."""
    known = [c for c in NAMES if c in samples and np.isfinite(samples[c].to_numpy(dtype=np.float64)).any()]
    if not known:
        return empty_figure(title, "No device was sampled in this run.")
    figure = FigureSpec()
    for column in known:
        hue = COUNTERS[column][dark]
        figure.add_line(
            samples["time_s"],
            100 * samples[column],
            {"color": hue, "width": 2, "dash": _DASHES[column]},
            name=NAMES[column],
            hovertemplate="%{y:.3g} % of the time",
        )
    figure.xaxis(title="time since the start (s)")
    figure.yaxis(title="share of time (%)", range=[0, 104])
    means = ", ".join(f"{NAMES[c]} {percent(float(samples[c].mean()))}" for c in known)
    alt = f"{title}, mean of {len(samples)} samples: {means}."
    return finish(figure, title, alt, hovermode="x unified", showlegend=True)  # also for a single line, to identify it
