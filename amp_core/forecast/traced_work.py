"""What a forecast is made from: the operators of one step in FP32 and under autocast, and what it holds in memory.

>>> wide, narrow = traces_of_run(run)
>>> wide.work.columns
Index(['op', 'phase', 'count', 'flops', 'bytes', 'narrow'], dtype='object')

A run was traced in one recipe; its step in the other one is derived. From autocast to FP32 that is exact but for fused
kernels: every 16-bit value becomes a 32-bit one and the casts go. From FP32 to autocast it is not: which operators
between matrix products run in 16 bits depends on what feeds them, so they are taken as half and half.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from amp_core.analysis import memory_moments, memory_steps
from amp_core.analysis.performance.gemm_shapes import Shape, tensor_shapes
from amp_core.analysis.performance.traced_ops import has_policies, traced_rows, traced_steps
from amp_core.analysis.steps import attempts, median
from amp_core.formats import autocast_dtypes, element_bytes, format_of
from amp_core.hardware import autocast_ops
from amp_core.schema import RunError
from amp_core.store.run import Run

_LOOKS_UP = ("embedding", "gather", "index_select", "index")
"""Operators that read as much as they write, however large the table is."""
_TENSORS_PER_LAUNCH = 36
"""Tensors that one launch of a multi-tensor kernel takes, four lists of them: `depth_to_max_tensors` of PyTorch's
ATen/native/cuda/MultiTensorApply.cuh."""
_READ_AND_WRITTEN = 3
"""Passes over a tensor for each operator of an optimizer: two read, one written."""


@dataclass(frozen=True)
class StepMemory:
    """What a step holds, in bytes; None where it is not known."""

    parameters: float | None = None
    gradients: float | None = None
    optimizer: float | None = None
    activations: float | None = None
    """Kept for backward, of the whole batch; grows with it."""
    weight_copies: float = 0.0
    """16-bit copies of weights that autocast keeps; do not grow with the batch."""


@dataclass(frozen=True)
class StepTrace:
    """One optimizer step."""

    name: str
    """Of what: a workload, a run."""
    recipe: str
    """`fp32`, or `amp` for autocast to a 16-bit format."""
    derived: bool
    """Derived from a trace of the other recipe."""
    samples: int | None
    """Of the step; None where not known."""
    work: pd.DataFrame
    """One row per operator and shape: op, phase, count (launches), flops (of matrix products, else 0), bytes (read and
    written), narrow (multiplies 16-bit factors)."""
    memory: StepMemory


def work_of(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of the table `ops` as work on a CUDA device.

    Operators that autocast leaves in 16 bits on a CPU but widens on CUDA (softmax, norms, losses) are counted wide.
    """
    found = []
    for row in rows.to_dict("records"):
        op = str(row["op"]).removeprefix("aten::")
        count = round(_number(row["count"], 1.0))
        written = _number(row["out_bytes"])
        shapes = tensor_shapes(row["in_shapes"]) if isinstance(row["in_shapes"], str) else ()
        dtypes = str(row["in_dtypes"] or "").split(", ")
        if not shapes:  # an optimizer's: multi-tensor kernels on CUDA
            moved, count = _READ_AND_WRITTEN * written, math.ceil(count / _TENSORS_PER_LAUNCH)
        elif op in _LOOKS_UP:
            moved = 2 * written
        else:
            moved = written + count * _read(shapes, dtypes)
            widens = (autocast_ops.policy(op, "cuda") or "").startswith("fp32")
            if widens and row["autocast"] in autocast_dtypes() and _is_narrow(row["out_dtype"]):
                moved *= 2  # CUDA casts its inputs and goes on in FP32
        found.append((op, row["phase"], count, _number(row["flops"]), moved, _is_narrow(dtypes[0])))
    return pd.DataFrame(found, columns=["op", "phase", "count", "flops", "bytes", "narrow"])


def widened(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of a step under autocast as the same step in FP32: without casts, every 16-bit value 32 bits wide."""
    rows = rows[rows["cast_by"].isna()].copy()
    narrow = rows["out_dtype"].map(_is_narrow)
    rows["out_bytes"] = rows["out_bytes"].astype(float) * np.where(narrow, 2.0, 1.0)
    for column in ("in_dtypes", "out_dtype"):
        rows[column] = rows[column].astype(object).str.replace(r"\bb?float16\b", "float32", regex=True)
    rows["autocast"] = None
    return rows


def narrowed(work: pd.DataFrame) -> pd.DataFrame:
    """Work in FP32 as under autocast, about: matrix products in 16 bits with casts of what they read, losses and norms
    in FP32, and all others half and half. The optimizer stays."""
    found = work.copy()
    matrix = found["flops"] > 0
    lists = [autocast_ops.policy(op.removesuffix("_backward"), "cuda") or "" for op in found["op"]]
    kept = found["phase"].eq("optimizer") | pd.Series([p.startswith("fp32") for p in lists], found.index, dtype=bool)
    share = np.where(matrix, 0.5, np.where(kept, 1.0, 0.75))
    found["bytes"] = found["bytes"] * share
    found["narrow"] = matrix
    casts = found[matrix].assign(op="_to_copy", flops=0.0, narrow=False)
    casts["bytes"] = casts["bytes"] * 0.5  # activations of one 16-bit product often serve the next without a cast
    return pd.concat([found, casts], ignore_index=True)


def traces_of_run(run: Run) -> tuple[StepTrace, StepTrace]:
    """The traced step of a run in FP32 and under autocast. Raises `RunError` for a run without one."""
    if not traced_steps(run) or not has_policies(run):
        raise RunError(
            f"run {run.name!r} has no traced step; record one with trace_ops=2 (on the command line --trace-ops) "
            "and forecast from that"
        )
    rows = traced_rows(run)
    steps = attempts(run)
    samples = median(steps["samples"].dropna())
    under_autocast = bool(rows["autocast"].isin(autocast_dtypes()).any())
    memory = _memory(run)
    own = work_of(rows)
    count = round(samples) if samples else None
    if under_autocast:
        wide = StepTrace(run.name, "fp32", True, count, work_of(widened(rows)), _rescaled(memory, 1.6, 0.0))
        return wide, StepTrace(run.name, "amp", False, count, own, memory)
    copies = (memory.parameters or 0.0) / 2
    narrow = StepTrace(run.name, "amp", True, count, narrowed(own), _rescaled(memory, 0.65, copies))
    return StepTrace(run.name, "fp32", False, count, own, memory), narrow


def _memory(run: Run) -> StepMemory:
    """The highest of each category over the moments of the step that was looked at."""
    if not memory_steps(run):
        return StepMemory()
    top = memory_moments(run)[["parameters", "gradients", "optimizer", "activations", "autocast"]].max()
    known = {name: None if math.isnan(value) else float(value) for name, value in top.items()}
    return StepMemory(
        known["parameters"], known["gradients"], known["optimizer"], known["activations"], known["autocast"] or 0.0
    )


def _rescaled(memory: StepMemory, factor: float, copies: float) -> StepMemory:
    """The same with other activations: between half and all of FP32's are left under autocast, mostly near 60 %."""
    activations = None if memory.activations is None else memory.activations * factor
    return StepMemory(memory.parameters, memory.gradients, memory.optimizer, activations, copies)


def _read(shapes: Sequence[Shape], dtypes: list[str]) -> float:
    """Bytes of the inputs of one call. Which tensor has which dtype the trace does not say: of two the second has the
    last one, of more those as large as the first have the first one."""
    sizes = [math.prod(shape) for shape in shapes]
    first, last = (element_bytes(dtypes[i]) or 4 for i in (0, -1))
    if len(sizes) == 2:
        return float(sizes[0] * first + sizes[1] * last)
    return float(sum(size * (first if size >= sizes[0] else last) for size in sizes))


def _number(value: Any, unknown: float = 0.0) -> float:
    """A cell as a number; `unknown` where it is null."""
    return unknown if value is None or math.isnan(value) else float(value)


def _is_narrow(dtype: object) -> bool:
    found = format_of(dtype)
    return found is not None and found.autocast
