"""Rows of traced operators, each with the format in which it ran and, for matrix products, its FLOPs.

    rows = traced_rows(run)             # the first traced step, first rank
    rows[rows["matrix"]].groupby("ran")["flops"].sum()

Own traces and imported ones name dtypes differently (`float16`, `c10::Half`); here they have the names of formats.
"""

import pandas as pd

from amp_core.analysis.performance.gemm_shapes import dtypes_of, is_matrix_op, product
from amp_core.formats import FORMATS, format_of
from amp_core.hardware import autocast_ops
from amp_core.schema import RunError
from amp_core.store.run import Run

_TEXTS = ("phase", "policy", "in_dtypes", "out_dtype", "device", "autocast", "in_shapes", "cast_by", "cast_of")

OUTSIDE = "(outside the model)"
"""Operators that no module called: of the loss, the scaler, the optimizer."""
ROOT = "(the model itself)"
"""Operators that the model's own forward called."""
UNKNOWN = "(module unknown)"
"""In traces without modules."""


def traced_steps(run: Run) -> list[int]:
    """Steps whose operators were traced, in order; empty if none was, or the trace has no step markers."""
    return [int(step) for step in sorted(run.ops["step"].dropna().unique())]


def has_policies(run: Run) -> bool:
    """Whether the trace records autocast: our own does, a profiler's does not."""
    ops = run.ops
    events = run.events
    return bool((events["kind"] == "traced").any() or ops["policy"].notna().any() or ops["autocast"].notna().any())


def traced_rows(run: Run, step: int | None = None) -> pd.DataFrame:
    """The rows of one traced step (the first by default) on the first rank that has them, with nulls replaced.

    Added: ran (format, None if the operator has no floating-point tensor), matrix (multiplies matrices), flops (of
    imported ones from their shapes; NaN if unknown), kind (device type), has_16_bit (autocast's list for that device
    has a 16-bit version), is_cast. Raises `RunError` for a step that was not traced.
    """
    rows: pd.DataFrame = run.ops
    steps = traced_steps(run)
    if step is not None and step not in steps:
        raise RunError(f"step={step} was not traced; choose one of {', '.join(map(str, steps)) or 'none'}")
    if steps:
        rows = rows[rows["step"] == (steps[0] if step is None else step)]
    rows = rows[rows["rank"] == rows["rank"].min()]
    rows = rows.reset_index(drop=True)
    no_module = OUTSIDE if has_policies(run) else UNKNOWN
    rows["module"] = rows["module"].astype(object).where(rows["module"].notna(), no_module)
    rows.loc[rows["module"] == "", "module"] = ROOT
    for column in _TEXTS:
        rows[column] = rows[column].astype(object).where(rows[column].notna(), None)
    rows["count"] = rows["count"].fillna(1).astype(int)
    rows["op"] = [str(op).removeprefix("aten::") for op in rows["op"]]
    rows["is_cast"] = rows["cast_by"].notna()
    rows["kind"] = [str(device or "cuda").partition(":")[0] for device in rows["device"]]
    rows["matrix"] = rows["flops"].notna() | pd.Series([is_matrix_op(op) for op in rows["op"]], rows.index, dtype=bool)
    given = rows[["flops", "op", "in_shapes", "count", "matrix"]]
    rows["flops"] = [
        _flops(flops, op, shapes, count) if matrix else float("nan")
        for flops, op, shapes, count, matrix in given.itertuples(index=False, name=None)
    ]
    rows["ran"] = [
        ran_in(i, o, m) for i, o, m in zip(rows["in_dtypes"], rows["out_dtype"], rows["matrix"], strict=True)
    ]
    listed = [autocast_ops.policy(op, kind) for op, kind in zip(rows["op"], rows["kind"], strict=True)]
    rows["has_16_bit"] = pd.Series([p == "lower_precision_fp" for p in listed], rows.index, dtype=bool)
    return rows


def ran_in(in_dtypes: str | None, out_dtype: str | None, matrix: bool) -> str | None:
    """The format in which an operator ran: that of its factors for a matrix product, else that of its output."""
    inputs = formats_of(in_dtypes)
    if matrix and inputs:
        return min(inputs, key=width)
    if (out := format_name(out_dtype)) is not None:
        return out
    # A number beside a tensor is FP64 in a profiler's trace, and does not promote it.
    tensors = [name for name in inputs if name != "fp64"] or inputs
    return max(tensors, key=width, default=None)


def formats_of(dtypes: str | None) -> list[str]:
    """Floating-point formats among the dtypes of a row: text such as `float32, int64`, or a profiler's JSON list."""
    names = dtypes_of(dtypes or "") or (dtypes or "").split(", ")
    return list(dict.fromkeys(f.name for f in map(format_of, names) if f is not None))


def width(name: str) -> tuple[int, int]:
    """Sort key of formats by name: `Format.width`."""
    return FORMATS[name].width


def format_name(dtype: str | None) -> str | None:
    """The name of the format that a dtype stores; None if it is not a floating-point dtype."""
    form = format_of(dtype)
    return None if form is None else form.name


def _flops(recorded: float, op: str, in_shapes: str | None, count: int) -> float:
    if recorded == recorded:
        return float(recorded)
    matrices = product(op, in_shapes or "")
    return float(matrices.flops * count) if matrices is not None and matrices.flops is not None else float("nan")
