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

from amp_core.analysis.downsample import thin
from amp_core.analysis.numerics.ranges import CLASSES, float_column, histogram_bounds, is_of_kind
from amp_core.schema import RunError
from amp_core.store.run import Run

MAX_STEPS = 500
"""So many columns a histogram over time has at most, each two pixels wide; neighbouring steps are added up beyond."""
MAX_POINTS = 1000
"""So many steps the curves of a tensor need."""

SUBNORMAL_LIMIT = 0.05
"""Share of nonzero values from which on subnormal ones are called many: at 5 %, much below them was lost."""


@dataclass(frozen=True)
class LayerHealth:
    """What first went wrong with a tensor. Steps are None where it never did."""

    samples: int
    """Steps at which it was sampled."""
    first_nonfinite: int | None
    """First sampled step with an infinite or NaN value."""
    nonfinite_samples: int
    first_subnormal: int | None
    """First with more than `SUBNORMAL_LIMIT` of its nonzero values subnormal in its own dtype."""
    worst_subnormal_frac: float
    """Largest such share (0–1)."""
    first_all_zero: int | None
    """First at which every value was zero."""


def tensor_names(run: Run, kind: str) -> list[str]:
    """Names of the tensors of a kind, in the order in which the run has them. Raises `RunError` for another kind."""
    return [
        str(name) for name in pc.unique(run.table("tensors").column("name").filter(is_of_kind(run, kind))).to_pylist()
    ]


def layer_trace(run: Run, kind: str, name: str) -> pd.DataFrame:
    """One row per sampled step, ranks taken together: step; dtype; loss_scale; numel; zero_frac, subnormal_frac,
    normal_frac, inf_frac, nan_frac (of all elements); subnormal_nonzero_frac (of the finite nonzero ones); absmax, rms
    (of the finite values, as stored; NaN where none is or not recorded). Raises `RunError` for an unknown tensor.
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
    found = by_step.agg(dtype=("dtype", "first"), loss_scale=("loss_scale", "first"), absmax=("absmax", "max"))
    for column in CLASSES:
        found[f"{column}_frac"] = sums[column] / sums["numel"].where(sums["numel"] > 0)
    nonzero = sums["subnormal"] + sums["normal"]
    found["subnormal_nonzero_frac"] = sums["subnormal"] / nonzero.where(nonzero > 0)
    found["rms"] = np.sqrt(sums["squares"] / sums["finite"].where(sums["finite"] > 0))
    found["absmax"] = found["absmax"].where(sums["finite"] > 0)
    found["numel"] = sums["numel"]
    return found.reset_index()


def layer_health(trace: pd.DataFrame) -> LayerHealth:
    """What first went wrong, from `layer_trace`."""
    nonfinite = trace["inf_frac"].fillna(0.0) + trace["nan_frac"].fillna(0.0) > 0
    subnormal = trace["subnormal_nonzero_frac"].fillna(0.0)
    all_zero = trace["zero_frac"].fillna(0.0) == 1.0

    def first(where: "pd.Series[bool]") -> int | None:
        return int(trace["step"][where].iloc[0]) if where.any() else None

    return LayerHealth(
        samples=len(trace),
        first_nonfinite=first(nonfinite),
        nonfinite_samples=int(nonfinite.sum()),
        first_subnormal=first(subnormal > SUBNORMAL_LIMIT),
        worst_subnormal_frac=float(subnormal.max()) if len(trace) else 0.0,
        first_all_zero=first(all_zero),
    )


def to_draw(trace: pd.DataFrame, most: int = MAX_POINTS) -> pd.DataFrame:
    """Of `layer_trace` the steps that curves need: of each stretch those of the largest and the smallest magnitude and
    of the most and the fewest subnormal values, and one at least that holds infinite or NaN values."""
    if len(trace) <= most:
        return trace
    bad = trace["inf_frac"].fillna(0.0) + trace["nan_frac"].fillna(0.0) > 0
    kept = [
        thin(trace.assign(bad=bad), "step", column, most // 2, keep="bad") for column in ("absmax", "subnormal_frac")
    ]
    return trace[trace["step"].isin(pd.concat(kept)["step"])].reset_index(drop=True)


def layer_exponents(
    run: Run,
    kind: str,
    name: str,
    true_exponents: bool = False,
    within: tuple[int, int] | None = None,
    most: int = MAX_STEPS,
) -> pd.DataFrame:
    """The tensor's histogram over time: step, exponent, share (of the finite nonzero values of that step), count.

    `true_exponents` divides by the loss scale of each step; `within` are the first and the last step to look at. Of
    more than `most` sampled steps neighbouring ones are added up under the first of them. Raises `RunError` for an
    unknown tensor.
    """
    table = _of_tensor(run, kind, name)
    if within is not None:
        table = table.filter((pc.field("step") >= within[0]) & (pc.field("step") <= within[1]))
    first, bins = histogram_bounds(table, true_exponents)
    steps, code = np.unique(float_column(table, "step").astype(np.int64), return_inverse=True)
    together = max(1, -(-len(steps) // most))
    column = np.repeat(code // together, bins)
    place = np.arange(bins.sum()) - np.repeat(np.cumsum(bins) - bins, bins)
    counts = pc.fill_null(pc.list_flatten(table.column("exp_counts").combine_chunks()), 0)
    frame = pd.DataFrame(
        {
            "step": steps[::together][column],
            "exponent": np.repeat(first, bins) + place,
            "count": counts.to_numpy(zero_copy_only=False).astype(np.int64),
        }
    )
    summed: pd.DataFrame = frame[frame["count"] > 0].groupby(["step", "exponent"])[["count"]].sum().reset_index()
    summed["share"] = summed["count"] / summed.groupby("step")["count"].transform("sum")
    return summed[["step", "exponent", "share", "count"]]


def _of_tensor(run: Run, kind: str, name: str, columns: tuple[str, ...] | None = None) -> pa.Table:
    """Rows of one tensor. With `columns` those of every sampled step, else of the steps that `run.table` holds."""
    chosen, table = is_of_kind(run, kind), run.table("tensors")
    if columns is not None:
        table = run.of_tensor(kind, name, columns)
    else:
        table = table.filter(pc.and_(chosen, pc.equal(table.column("name"), name)))
    if not table.num_rows:
        raise RunError(f"name={name!r} was not sampled as {kind} in this run")
    return table
