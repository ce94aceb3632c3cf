"""The steps of a run, one row per step, and facts from the head that several analyses need.

    frame = attempts(run)          # ranks and optimizers of one step together
    scaler_enabled(run)

With several ranks or optimizers the table `steps` has several rows per step. `attempts` merges them: a step is skipped
if any row is; its time and phases are those of the slowest rank; samples of the ranks are summed, and so are squares of
gradient norms where each rank has a shard of each gradient; the loss is the first one recorded; everything else is from
the first optimizer of rank 0.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import pyarrow.compute as pc

from amp_core import phases
from amp_core.formats import FORMATS
from amp_core.store.run import Run

TIMES = ("step_ms", *phases.COLUMNS)
MAX_WARMUP_STEPS = 10
"""Most first steps that timings leave out; see `warmup_steps`."""
SLOW_FIRST_RATIO = 5.0
"""A first step that takes this many times as long as the others is explained on the live page."""


def attempts(run: Run) -> pd.DataFrame:
    """Table `steps` with one row per step attempted, in order of `step`.

    Null numbers become NaN, so `has_loss` distinguishes a loss that was not recorded from one that is NaN; `skipped`
    is never null.
    """
    return run.cached_frame(["steps"], _attempts)


def _attempts(run: Run) -> pd.DataFrame:
    frame = run.steps
    frame["has_loss"] = pc.is_valid(run.table("steps").column("loss")).to_numpy()
    frame["skipped"] = pc.fill_null(run.table("steps").column("skipped"), False).to_numpy()
    for column in ("loss", "loss_scale", "grad_norm", "growth_tracker", "samples", *TIMES):
        frame[column] = frame[column].astype(float)  # a column of only nulls has dtype object
    steps = frame["step"].to_numpy()
    if (steps[1:] > steps[:-1]).all():
        return frame
    frame = frame.sort_values(["step", "rank", "optimizer"], kind="stable")
    whole = frame[~frame["step"].duplicated()].reset_index(drop=True)
    by_step, by_rank = frame.groupby("step"), frame.groupby(["step", "rank"])
    losses = frame[frame["has_loss"]].drop_duplicates("step").set_index("step")["loss"]
    whole["loss"], whole["has_loss"] = whole["step"].map(losses), whole["step"].isin(losses.index)
    whole["skipped"] = by_step["skipped"].any().to_numpy()
    times = by_rank[list(TIMES)].sum(min_count=1)  # the optimizers of a step run one after another, the ranks at a time
    slowest = times["step_ms"].fillna(times[list(phases.COLUMNS)].sum(axis=1)).groupby("step").idxmax()
    for column in TIMES:  # phases of different ranks would add up to more than the step
        whole[column] = times.loc[slowest, column].to_numpy()
    whole["samples"] = by_rank["samples"].max().groupby("step").sum(min_count=1).to_numpy()
    shards = whole_number(run.head.config.get("shards")) or 1
    if shards > 1:  # each rank's norm is that of its shards, and each shard counts once per replica
        squares = by_rank["grad_norm"].first().pow(2).groupby("step")
        replicas = max(1, run.head.world_size // shards)
        whole["grad_norm"] = (squares.sum(min_count=1) / replicas).pow(0.5).to_numpy()
    for column in ("memory_allocated_bytes", "memory_peak_bytes"):
        whole[column] = by_step[column].max().to_numpy()
    return whole


def attempts_with_axes(run: Run) -> pd.DataFrame:
    """`attempts` with the x axes of curves: `samples` cumulative from the start of the run, and `time_s`, which for a
    run interleaved with others is the time of its own steps."""
    frame = attempts(run)
    frame["samples"], frame["time_s"] = frame["samples"].cumsum(), frame["time_s"].astype(float)
    if "comparison" in run.head.config:  # interleaved: the clock ran on while others trained
        frame["time_s"] = frame["step_ms"].cumsum() / 1e3
    return frame


def scaler_enabled(run: Run) -> bool:
    """Whether a GradScaler was active, from the head or, where it does not say, from the recorded loss scales."""
    config = run.head.config
    if "scaler" in config:
        scaler = config["scaler"]
        return bool(scaler.get("enabled", True)) if isinstance(scaler, dict) else bool(scaler)
    steps = run.table("steps")
    scales = steps.column("loss_scale")
    moved = pc.any(pc.not_equal(scales, 1.0)).as_py()
    return bool(moved) or steps.column("growth_tracker").null_count < steps.num_rows


def recipe(run: Run) -> str | None:
    """The precision recipe's name, e.g. `fp16`; None where not recorded."""
    precision = run.head.config.get("precision")
    return precision if isinstance(precision, str) and precision else None


def autocast_dtype(run: Run) -> str | None:
    """`float16` or `bfloat16` if the run's forward was under autocast; None if it was not or is not known."""
    config = run.head.config
    dtype = config.get("autocast_dtype")
    if isinstance(dtype, str):
        return dtype
    if dtype is not None or "autocast_dtype" in config:
        return None
    form = FORMATS.get((recipe(run) or "").removesuffix("-unscaled"))
    return form.dtype if form is not None and form.autocast else None


def emulated(run: Run) -> bool:
    """Whether the run emulates the 8- or 4-bit products of its recipe: its numerics are valid, times and memory are
    not."""
    return run.head.config.get("emulated") is True


def whole_number(value: object) -> int | None:
    """`value` if it is a whole number; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def warmup_steps(steps: int) -> int:
    """Number of first steps that timings leave out: a fifth of a short run, at most `MAX_WARMUP_STEPS`.

    They include allocation, kernel selection, compilation and the first reading of data.
    """
    return min(MAX_WARMUP_STEPS, steps // 5)


@dataclass(frozen=True)
class FirstStep:
    """A first step that took much longer than the others."""

    step: int
    step_ms: float


def slow_first_step(run: Run) -> FirstStep | None:
    """The first step if it took at least a second and `SLOW_FIRST_RATIO` times the median of the others; else None."""
    times = run.steps[["step", "step_ms"]].dropna()
    if len(times) < 2:
        return None
    first, others = times.iloc[0], median(times["step_ms"].iloc[1:])
    slow = others is not None and first["step_ms"] >= max(1e3, SLOW_FIRST_RATIO * others)
    return FirstStep(int(first["step"]), float(first["step_ms"])) if slow else None


def median(values: "np.ndarray[tuple[int], np.dtype[np.float64]] | pd.Series[float]") -> float | None:
    """Median of the finite values; None if there are none."""
    known = np.asarray(values, dtype=np.float64)
    known = known[np.isfinite(known)]
    return float(np.median(known)) if len(known) else None


def quantile(values: "np.ndarray[tuple[int], np.dtype[np.float64]] | pd.Series[float]", frac: float) -> float | None:
    """The value below which a share of `frac` of the finite values lies; None if there are none."""
    known = np.asarray(values, dtype=np.float64)
    known = known[np.isfinite(known)]
    return float(np.quantile(known, frac)) if len(known) else None
