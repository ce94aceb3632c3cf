"""What the first sentence says of steps of a trace that differ in length.

uneven_steps(run)     # 'The steps differ: step 4 takes 397 ms, the median 144 ms, so means per step fit none of them.'
"""

import numpy as np

from amp_core.analysis.performance.kernels import is_trace
from amp_core.store.run import Run
from amp_core.text.formatting import number

MIN_UNEVEN_RATIO = 1.5
"""A step that takes that many times as long as the median, or that part of it, differs."""
MIN_STEPS = 3


def uneven_steps(run: Run) -> str:
    """A sentence on the steps of a trace, of which at least one is far from the median; empty for others."""
    if not is_trace(run):
        return ""
    frame = run.steps
    frame = frame[np.isfinite(frame["step_ms"].astype(float))]
    ms = frame.groupby("step")["step_ms"].mean()
    median = float(ms.median()) if len(ms) >= MIN_STEPS else 0.0
    if median <= 0:
        return ""
    apart = ms[(ms >= MIN_UNEVEN_RATIO * median) | (ms * MIN_UNEVEN_RATIO <= median)]
    if apart.empty:
        return ""
    farthest = (np.log(apart.clip(lower=1e-6) / median)).abs().idxmax()
    others = f", and {len(apart) - 1} more differ" if len(apart) > 1 else ""
    return (
        f"The steps differ: step {farthest:.0f} takes {number(float(ms[farthest]), 'ms')}, the median "
        f"{number(median, 'ms')}{others}, so means per step fit none of them."
    )
