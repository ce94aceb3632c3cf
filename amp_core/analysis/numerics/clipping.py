"""Whether gradients were clipped while they were still multiplied by the loss scale, by code of the loop's own.

    >>> clipped_while_scaled(run)
    ('a norm of 1', (0, 99))

Gradients are recorded as `scaler.unscale_` or `scaler.step` gets them. A clip before that leaves the same norm, or the
same largest value, in each step, since scaled gradients always exceed the threshold. So does a training that hardly
moves, such as one on its whole data at a low learning rate; there, losses change as little as norms do.
"""

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from amp_core.analysis.steps import attempts
from amp_core.store.run import Run
from amp_core.text.formatting import number

MIN_STEPS = 5
"""Fewest steps with the same norm of all gradients."""
MIN_TENSORS = 3
"""Fewest tensors with the same figure, in each of two sampled steps or more."""
MAX_SAMPLES = 16
"""Sampled steps that are compared."""
EQUAL_RATIO = 1.01
"""Norms that differ by less count as the same: thresholds are divided by the norm plus an eps."""
MIN_CLIPPED_FRAC = 0.8
"""Share of the steps, or of the tensors, that have the same figure."""
MAX_CHANGE = 2e-5
"""Largest median change, from step to step and relative, of norms at a threshold: that of rounding and of the eps."""
MAX_CHANGE_OF_LOSS = 0.1
"""The same as a share of the losses' median change. A loss changes with each batch, and the norm of its gradients at
least as much, unless a threshold holds them."""


def clipped_while_scaled(run: Run) -> tuple[str, tuple[int, int]] | None:
    """What all scaled gradients have in common, in words, and the first and last step; None if they have nothing."""
    trace = attempts(run)
    trace = trace[~trace["skipped"] & (trace["loss_scale"] > 1)]
    norms = (trace["grad_norm"] * trace["loss_scale"]).to_numpy(dtype=float)
    known = np.isfinite(norms) & (norms > 0)
    losses, norms = trace["loss"].to_numpy(dtype=float)[known], norms[known]
    if len(norms) >= MIN_STEPS and norms.min() < norms.max():
        at = _common(norms)
        if at is not None and _change(norms) < max(MAX_CHANGE, MAX_CHANGE_OF_LOSS * _change(losses)):
            return f"a norm of {number(at)}", (int(trace["step"].iloc[0]), int(trace["step"].iloc[-1]))
    return _in_tensors(run, set(trace["step"]))


def _in_tensors(run: Run, made: set[int]) -> tuple[str, tuple[int, int]] | None:
    table = run.table("tensors").select(["step", "name", "kind", "numel", "absmax", "rms", "loss_scale"])
    table = table.filter(pc.equal(table.column("kind"), "weight_grad"))
    steps = sorted(made.intersection(pc.unique(table.column("step")).to_pylist()))[:MAX_SAMPLES]
    frame: pd.DataFrame = table.filter(pc.is_in(table.column("step"), pa.array(steps, pa.int64()))).to_pandas()
    frame = frame[(frame["loss_scale"] > 1) & (frame["rms"] > 0) & (frame["numel"] > 1)]
    frame = frame[np.isfinite(frame["absmax"].astype(float))]
    if frame["step"].nunique() < 2 or frame["name"].nunique() < MIN_TENSORS:
        return None
    norms = frame["rms"].to_numpy(dtype=float) * np.sqrt(frame["numel"].to_numpy(dtype=float))
    for what, values in (("a largest value", frame["absmax"].to_numpy(dtype=float)), ("a norm per tensor", norms)):
        if (at := _common(values)) is not None:
            return f"{what} of {number(at)}", (int(frame["step"].min()), int(frame["step"].max()))
    return None


def _change(values: np.ndarray) -> float:
    """The median change from one step to the next, relative to the median value; 0 of fewer than two finite values."""
    values = values[np.isfinite(values)]
    if len(values) < 2 or not (middle := float(np.median(np.abs(values)))):
        return 0.0
    return float(np.median(np.abs(np.diff(values)))) / middle


def _common(values: np.ndarray) -> float | None:
    """The value that at least `MIN_CLIPPED_FRAC` of the values have, and none exceeds; None if there is none."""
    top = float(values.max())
    return top if (values * EQUAL_RATIO >= top).mean() >= MIN_CLIPPED_FRAC else None
