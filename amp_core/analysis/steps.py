"""What several analyses ask of a run's steps: one row per step, and what the head says of the recipe.

    frame = attempts(run)          # ranks and optimizers of one step together
    scaler_enabled(run)

With several ranks or optimizers the table `steps` has several rows per step. Here a step is skipped where any row says
so; the slowest rank sets its time; samples of the ranks add up, and so do squares of norms where each
rank has a part of each gradient; the loss is the first one recorded; all else is as the first optimizer of rank 0 has
it.
"""

import numpy as np
import pandas as pd
import pyarrow.compute as pc

from amp_core import phases
from amp_core.store.run import Run

TIMES = ("step_ms", *phases.COLUMNS)
WARMUP_STEPS = 10
"""So many first steps of a run are left out of timings; see `warmup_steps`."""


def attempts(run: Run) -> pd.DataFrame:
    """Table `steps` with one row per step attempted, in order of `step`.

    Null numbers are NaN here, so `has_loss` tells a loss that was not recorded from one that is not a number; `skipped`
    is never null.
    """
    return run.cached_frame(["steps"], _attempts)


def _attempts(run: Run) -> pd.DataFrame:
    frame = run.steps
    frame["has_loss"] = pc.is_valid(run.table("steps").column("loss")).to_numpy()
    frame["skipped"] = pc.fill_null(run.table("steps").column("skipped"), False).to_numpy()
    for column in ("loss", "loss_scale", "grad_norm", "growth_tracker", "samples", *TIMES):
        frame[column] = frame[column].astype(float)  # a column of nulls alone arrives as objects
    steps = frame["step"].to_numpy()
    if (steps[1:] > steps[:-1]).all():
        return frame
    frame = frame.sort_values(["step", "rank", "optimizer"], kind="stable")
    whole = frame[~frame["step"].duplicated()].reset_index(drop=True)
    by_step, by_rank = frame.groupby("step"), frame.groupby(["step", "rank"])
    losses = frame[frame["has_loss"]].drop_duplicates("step").set_index("step")["loss"]
    whole["loss"], whole["has_loss"] = whole["step"].map(losses), whole["step"].isin(losses.index)
    whole["skipped"] = by_step["skipped"].any().to_numpy()
    for column in TIMES:  # the optimizers of a step work one after another, the ranks side by side
        whole[column] = by_rank[column].sum(min_count=1).groupby("step").max().to_numpy()
    whole["samples"] = by_rank["samples"].max().groupby("step").sum(min_count=1).to_numpy()
    shards = whole_number(run.head.config.get("shards")) or 1
    if shards > 1:  # each rank's norm is that of its shards; as many ranks as have the same one count it again
        squares = by_rank["grad_norm"].first().pow(2).groupby("step")
        replicas = max(1, run.head.world_size // shards)
        whole["grad_norm"] = (squares.sum(min_count=1) / replicas).pow(0.5).to_numpy()
    for column in ("memory_allocated_bytes", "memory_peak_bytes"):
        whole[column] = by_step[column].max().to_numpy()
    return whole


def along(run: Run) -> pd.DataFrame:
    """`attempts` with what curves are drawn over: `samples` counted from the start of the run, and `time_s`, of a run
    that took turns with others that of its own steps."""
    frame = attempts(run)
    frame["samples"], frame["time_s"] = frame["samples"].cumsum(), frame["time_s"].astype(float)
    if "comparison" in run.head.config:  # it took turns: the clock went on while others trained
        frame["time_s"] = frame["step_ms"].cumsum() / 1e3
    return frame


def scaler_enabled(run: Run) -> bool:
    """Whether a GradScaler was at work: as the head says or, where it says nothing, as the recorded scales show."""
    config = run.head.config
    if "scaler" in config:
        scaler = config["scaler"]
        return bool(scaler.get("enabled", True)) if isinstance(scaler, dict) else bool(scaler)
    steps = run.table("steps")
    scales = steps.column("loss_scale")
    moved = pc.any(pc.not_equal(scales, 1.0)).as_py()
    return bool(moved) or steps.column("growth_tracker").null_count < steps.num_rows


def recipe(run: Run) -> str | None:
    """The precision recipe's name, e.g. `fp16`; None where the run does not say."""
    precision = run.head.config.get("precision")
    return precision if isinstance(precision, str) and precision else None


def whole_number(value: object) -> int | None:
    """`value` from a head, where it is a whole number; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def warmup_steps(steps: int) -> int:
    """How many first steps are left out of timings: a fifth of a short run, at most `WARMUP_STEPS`.

    The first ones pay for allocation, kernel selection, compilation and reading data for the first time.
    """
    return min(WARMUP_STEPS, steps // 5)


def median(values: "np.ndarray[tuple[int], np.dtype[np.float64]] | pd.Series[float]") -> float | None:
    """Median of the finite values; None where there is none."""
    known = np.asarray(values, dtype=np.float64)
    known = known[np.isfinite(known)]
    return float(np.median(known)) if len(known) else None


def quantile(values: "np.ndarray[tuple[int], np.dtype[np.float64]] | pd.Series[float]", frac: float) -> float | None:
    """The value below which a share of `frac` of the finite values lies; None where there is none."""
    known = np.asarray(values, dtype=np.float64)
    known = known[np.isfinite(known)]
    return float(np.quantile(known, frac)) if len(known) else None
