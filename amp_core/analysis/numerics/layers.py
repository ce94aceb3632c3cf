"""One tensor over the steps at which it was sampled: its classes, its magnitudes, its exponents.

>>> trace = layer_trace(run, "weight_grad", "head.weight")
>>> layer_health(trace).first_nonfinite
40
>>> layer_exponents(run, "weight_grad", "head.weight")  # step, exponent, share, count
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from amp_core.analysis.downsample import downsample
from amp_core.analysis.numerics.ranges import CLASSES, filled_bins, float_column, histogram_bounds, is_of_kind
from amp_core.schema import RunError
from amp_core.store.run import Run

MAX_STEPS = 500
"""Most columns of a histogram over time, each two pixels wide; beyond it neighbouring steps are summed."""
MAX_POINTS = 1000
"""Most steps in the curves of a tensor."""

MAX_SUBNORMAL_FRAC = 0.05
"""Share of nonzero values from which subnormals count as many: at 5 %, much underflowed below them."""


@dataclass(frozen=True)
class LayerHealth:
    """The first problems of a tensor. A step is None if the problem never occurred."""

    samples: int
    """Steps at which it was sampled."""
    first_nonfinite: int | None
    """First sampled step with an infinite or NaN value."""
    nonfinite_samples: int
    first_subnormal: int | None
    """First with more than `MAX_SUBNORMAL_FRAC` of its nonzero values subnormal in its own dtype."""
    worst_subnormal_frac: float
    """Largest such share (0–1)."""
    first_all_zero: int | None
    """First at which every value was zero."""


def tensor_names(run: Run, kind: str) -> list[str]:
    """Names of the tensors of a kind, in the run's order. Raises `RunError` for an unknown kind."""
    return [
        str(name) for name in pc.unique(run.table("tensors").column("name").filter(is_of_kind(run, kind))).to_pylist()
    ]


def first_nonfinite(run: Run, kind: str) -> dict[int, str]:
    """For each sampled step with a tensor of `kind` that was not finite, the first of them that was computed. Raises
    `RunError` for an unknown kind."""
    table = run.table("tensors").select(["step", "name", "kind", "inf", "nan"])
    bad = pc.greater(pc.add(pc.fill_null(table.column("inf"), 0), pc.fill_null(table.column("nan"), 0)), 0)
    frame = table.filter(pc.and_(is_of_kind(run, kind), bad)).select(["step", "name"]).to_pandas().dropna()
    # Rows are in the order of computation, but weight gradients in that of the model, which backward reverses.
    frame = frame.drop_duplicates("step", keep="last" if kind == "weight_grad" else "first")
    return {int(step): str(name) for step, name in zip(frame["step"], frame["name"], strict=True)}


def layer_trace(run: Run, kind: str, name: str) -> pd.DataFrame:
    """One row per sampled step, over all ranks: step; dtype; loss_scale; numel; zero_frac, subnormal_frac,
    normal_frac, inf_frac, nan_frac (of all elements); subnormal_nonzero_frac (of the finite nonzero ones); absmax, rms
    (of the finite values, as stored; NaN if none is or not recorded). Raises `RunError` for an unknown tensor.
    """
    numbers = ("step", "loss_scale", "numel", "absmax", "rms", *CLASSES)
    table = _of_tensor(run, kind, name, (*numbers, "dtype"))
    columns = {c: float_column(table, c) for c in numbers}
    frame = pd.DataFrame(columns).astype({"step": np.int64})
    finite = frame["zero"] + frame["subnormal"] + frame["normal"]
    frame["squares"] = frame["rms"] ** 2 * finite
    frame["finite"] = finite
    frame["dtype"] = table.column("dtype").to_pylist()
    by_step = frame.groupby("step", sort=True)
    sums = by_step[["numel", "squares", "finite", *CLASSES]].sum(min_count=1)
    trace = by_step.agg(dtype=("dtype", "first"), loss_scale=("loss_scale", "first"), absmax=("absmax", "max"))
    for column in CLASSES:
        trace[f"{column}_frac"] = sums[column] / sums["numel"].where(sums["numel"] > 0)
    nonzero = sums["subnormal"] + sums["normal"]
    trace["subnormal_nonzero_frac"] = sums["subnormal"] / nonzero.where(nonzero > 0)
    trace["rms"] = np.sqrt(sums["squares"] / sums["finite"].where(sums["finite"] > 0))
    trace["absmax"] = trace["absmax"].where(sums["finite"] > 0)
    trace["numel"] = sums["numel"]
    return trace.reset_index()


def layer_health(trace: pd.DataFrame) -> LayerHealth:
    """The first problems of a tensor, from `layer_trace`."""
    nonfinite = trace["inf_frac"].fillna(0.0) + trace["nan_frac"].fillna(0.0) > 0
    subnormal = trace["subnormal_nonzero_frac"].fillna(0.0)
    all_zero = trace["zero_frac"].fillna(0.0) == 1.0

    def first(where: "pd.Series[bool]") -> int | None:
        return int(trace["step"][where].iloc[0]) if where.any() else None

    return LayerHealth(
        samples=len(trace),
        first_nonfinite=first(nonfinite),
        nonfinite_samples=int(nonfinite.sum()),
        first_subnormal=first(subnormal > MAX_SUBNORMAL_FRAC),
        worst_subnormal_frac=float(subnormal.max()) if len(trace) else 0.0,
        first_all_zero=first(all_zero),
    )


def downsample_trace(trace: pd.DataFrame, max_points: int = MAX_POINTS) -> pd.DataFrame:
    """`layer_trace` downsampled for curves: of each interval the steps with the largest and the smallest magnitude and
    with the most and the fewest subnormals, and at least one with infinite or NaN values."""
    if len(trace) <= max_points:
        return trace
    bad = trace["inf_frac"].fillna(0.0) + trace["nan_frac"].fillna(0.0) > 0
    kept = [
        downsample(trace.assign(bad=bad), "step", column, max_points // 2, keep="bad")
        for column in ("absmax", "subnormal_frac")
    ]
    return trace[trace["step"].isin(pd.concat(kept)["step"])].reset_index(drop=True)


def layer_exponents(
    run: Run,
    kind: str,
    name: str,
    true_exponents: bool = False,
    within: tuple[int, int] | None = None,
    max_steps: int = MAX_STEPS,
) -> pd.DataFrame:
    """The tensor's histogram over time: step, exponent, share (of the finite nonzero values of that step), count.

    `true_exponents` divides by the loss scale of each step; `within` are the first and the last step. With
    more than `max_steps` sampled steps, neighbouring ones are summed under the first of them. Raises `RunError` for an
    unknown tensor.
    """
    table = _of_tensor(run, kind, name)
    if within is not None:
        table = table.filter((pc.field("step") >= within[0]) & (pc.field("step") <= within[1]))
    first, _ = histogram_bounds(table, true_exponents)
    steps, code = np.unique(float_column(table, "step").astype(np.int64), return_inverse=True)
    steps_per_column = max(1, -(-len(steps) // max_steps))
    column = steps[::steps_per_column][code // steps_per_column]
    parts = [
        pd.DataFrame({"step": column[row], "exponent": first[row] + place, "count": count.astype(np.int64)})
        for row, place, count in filled_bins(table)
    ]
    summed: pd.DataFrame = pd.concat(parts).groupby(["step", "exponent"])[["count"]].sum().reset_index()
    summed["share"] = summed["count"] / summed.groupby("step")["count"].transform("sum")
    return summed[["step", "exponent", "share", "count"]]


def _of_tensor(run: Run, kind: str, name: str, columns: tuple[str, ...] | None = None) -> pa.Table:
    """Rows of one tensor. With `columns` those of every sampled step, else of the steps that `run.table` holds."""
    of_kind, table = is_of_kind(run, kind), run.table("tensors")
    if columns is not None:
        table = run.of_tensor(kind, name, columns)
    else:
        table = table.filter(pc.and_(of_kind, pc.equal(table.column("name"), name)))
    if not table.num_rows:
        raise RunError(f"name={name!r} was not sampled as {kind} in this run")
    return table
