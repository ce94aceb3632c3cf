"""Loss curves of several runs in one frame, along steps, samples or time.

>>> loss_curves([run_fp32, run_fp16], x="samples", max_points=4000)  # run, precision, samples, loss, smooth
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pandas as pd

from amp_core.analysis.downsample import downsample
from amp_core.analysis.run_labels import unique_labels
from amp_core.analysis.steps import attempts_with_axes, recipe
from amp_core.schema import RunError
from amp_core.store.run import Run

X_AXES = ("step", "samples", "time_s")


def loss_curves(
    runs: Sequence[Run],
    x: Literal["step", "samples", "time_s"] = "step",
    max_points: int | None = None,
) -> pd.DataFrame:
    """The losses of several runs in one frame: run (label), precision, `x`, loss, smooth.

    `samples` is cumulative from the start of each run; the time of an interleaved run is that of its own
    steps. `smooth` is an exponential mean over about 1/25 of the run; it is NaN if the loss is not finite.
    Steps without a recorded loss are left out. With `max_points`, each run is downsampled to about that many rows.
    Raises `RunError` for another `x`.
    """
    if x not in X_AXES:
        raise RunError(f"x={x!r} is unknown; choose one of {', '.join(X_AXES)}")
    parts = []
    for run, label in zip(runs, unique_labels(runs), strict=True):
        frame = attempts_with_axes(run)
        frame = frame[frame["has_loss"] & frame[x].notna()]
        loss = frame["loss"].to_numpy()
        finite = pd.Series(np.where(np.isfinite(loss), loss, np.nan))
        smooth = finite.ewm(span=max(1.0, len(finite) / 25), ignore_na=True).mean()
        part = pd.DataFrame({x: frame[x].to_numpy(), "loss": loss, "smooth": smooth.where(finite.notna())})
        part = part if max_points is None else downsample(part, x, "loss", max_points)
        part.insert(0, "run", label)
        part.insert(1, "precision", recipe(run))
        parts.append(part)
    columns = ["run", "precision", x, "loss", "smooth"]
    parts = [p for p in parts if len(p)]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame({c: pd.Series(dtype=float) for c in columns})


def loss_difference(curves: pd.DataFrame, band: pd.DataFrame | None = None) -> pd.DataFrame:
    """The smoothed loss of each run less that of the baseline at the same place: run, precision, `x`, delta.

    `curves` is from `loss_curves`; the baseline is its first run, or the mean of the baseline's seeds if `band`, from
    `noise_band`, has any; then the seeds are compared with it too. Only the part that both have is compared.
    """
    x = next((c for c in X_AXES if c in curves), X_AXES[0])
    parts: list[pd.DataFrame] = []
    runs = [rows for _, rows in curves.groupby("run", sort=False)]
    if band is not None and len(band):
        base, compared = band.rename(columns={"middle": "smooth"}), runs
    else:
        base, compared = (runs[0] if runs else curves), runs[1:]
    base = base.dropna(subset=["smooth"])
    for rows in compared:
        places = rows[x].to_numpy(dtype=np.float64)
        known = base[x].to_numpy(dtype=np.float64)
        shared = (places >= known.min()) & (places <= known.max()) if len(known) else np.zeros(len(places), dtype=bool)
        if shared.any():
            part = rows.loc[shared, ["run", "precision", x]]
            baseline = np.interp(places[shared], known, base["smooth"].to_numpy(dtype=np.float64))
            parts.append(part.assign(delta=rows.loc[shared, "smooth"] - baseline))
    columns = ["run", "precision", x, "delta"]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame({c: pd.Series(dtype=float) for c in columns})
