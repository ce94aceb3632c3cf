"""What a page marks on its time axes, and which run another one is held against.

>>> step_marks(run)  # step, kind (`skipped` or `change`), what (in words)
>>> lost_gradient(run)
0.0031
>>> reference([{"precision": "fp16", "workload": "text-gpt"}, {"precision": "fp32", "workload": "text-gpt"}], 0)
1
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from amp_core.analysis._steps import attempts, scaler_enabled
from amp_core.run import Run

TASK = ("workload", "size", "batch_size", "accumulate", "device")
"""Settings in which two runs must agree to be of one task on one machine."""
MOST_MARKS = 2000
"""So many marks are made at most, evenly chosen among the skipped steps: more could not be told apart."""


def step_marks(run: Run) -> pd.DataFrame:
    """Steps worth a mark on every time axis: skipped ones, and those at which something about the watching changed.

    Columns: step, samples (seen so far; NaN where not recorded), time_s, kind (`skipped` or `change`), what.
    """
    frame = attempts(run)[["step", "time_s", "samples", "skipped"]]
    frame = frame.assign(samples=frame["samples"].cumsum(), time_s=frame["time_s"].astype(float))
    skipped = frame[frame["skipped"]]
    if len(skipped) > MOST_MARKS:
        skipped = skipped.iloc[np.linspace(0, len(skipped) - 1, MOST_MARKS).astype(int)]
    skips = skipped.drop(columns="skipped").assign(kind="skipped", what="step skipped")
    events = run.events
    changes = events[(events["kind"] == "phase change") & events["step"].notna()][["step", "name", "detail"]]
    found = changes.merge(frame.drop(columns="skipped"), on="step", how="inner")
    found["what"] = found["name"] + ": " + found["detail"]
    columns = ["step", "samples", "time_s", "kind", "what"]
    return pd.concat([skips[columns], found.assign(kind="change")[columns]], ignore_index=True)


def lost_gradient(run: Run) -> float | None:
    """Share (0–1) of the nonzero gradient elements that the recipe turned to zero, as its audits measured it at the
    run's own loss scale; None without an audit."""
    audits = run.audits
    if audits.empty:
        return None
    frame = attempts(run)
    own = frame.set_index("step")["loss_scale"].fillna(1.0) if scaler_enabled(run) else pd.Series(dtype=float)
    at_own = audits["loss_scale"] == audits["step"].map(own).fillna(1.0)
    nonzero = audits.loc[at_own, "nonzero"].sum()
    return float(audits.loc[at_own, "lost"].sum() / nonzero) if nonzero else None


def reference(configs: Sequence[Mapping[str, Any]], of: int) -> int | None:
    """The place of the FP32 run (TF32 failing that) that trains the same task as `configs[of]`; None without one.

    With several the one of the same seed, and among those the first.
    """
    own = configs[of]
    if not own.get("workload") or own.get("precision") in ("fp32", None):
        return None
    alike = [
        place
        for place, config in enumerate(configs)
        if place != of
        and config.get("precision") in ("fp32", "tf32")
        and all(config.get(name) == own.get(name) for name in TASK)
    ]

    def rank(place: int) -> tuple[bool, bool]:
        return (configs[place].get("precision") != "fp32", configs[place].get("seed") != own.get("seed"))

    return min(alike, key=rank, default=None)
