"""Input of a forecast: the operators of one step in FP32 and under autocast, and its memory.

>>> wide, narrow = traces_of_run(run)
>>> wide.work.columns
Index(['op', 'phase', 'count', 'flops', 'bytes', 'narrow'], dtype='object')

A run is traced in one recipe; its step in the other recipe is derived. From autocast to FP32 this is exact except for
fused kernels: 16-bit values become 32-bit ones and the casts disappear. From FP32 to autocast it is an estimate: which
operators between matrix products run in 16 bits depends on their inputs, so they count as half and half.
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
from amp_core.analysis.steps import attempts, emulated, median, recipe
from amp_core.formats import autocast_dtypes, element_bytes, format_of
from amp_core.hardware import autocast_ops
from amp_core.schema import RunError
from amp_core.store.run import Run

_LOOKUP_OPS = ("embedding", "gather", "index_select", "index")
"""Operators that read as much as they write, whatever the size of the table."""
_TENSORS_PER_LAUNCH = 36
"""Tensors per launch of a multi-tensor kernel over four lists: `depth_to_max_tensors` in PyTorch's
ATen/native/cuda/MultiTensorApply.cuh."""
_OPTIMIZER_PASSES = 3
"""Passes over a tensor per operator of an optimizer: two reads, one write."""


@dataclass(frozen=True)
class StepMemory:
    """Memory of a step in bytes; None where not known."""

    parameters: float | None = None
    gradients: float | None = None
    optimizer: float | None = None
    activations: float | None = None
    """Saved for backward, of the whole batch; grows with the batch."""
    weight_copies: float = 0.0
    """16-bit copies of weights that autocast caches; do not grow with the batch."""


@dataclass(frozen=True)
class StepTrace:
    """One optimizer step."""

    name: str
    """Name of the workload or run."""
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


def device_work(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of the table `ops` as work on a CUDA device.

    Operators that autocast leaves in 16 bits on a CPU but runs in FP32 on CUDA (softmax, norms, losses) count as FP32.
    """
    work = []
    for row in rows.to_dict("records"):
        op = str(row["op"]).removeprefix("aten::")
        count = round(_number(row["count"], 1.0))
        written = _number(row["out_bytes"])
        shapes = tensor_shapes(row["in_shapes"]) if isinstance(row["in_shapes"], str) else ()
        dtypes = str(row["in_dtypes"] or "").split(", ")
        if not shapes:  # the optimizer's operators: multi-tensor kernels on CUDA
            traffic, count = _OPTIMIZER_PASSES * written, math.ceil(count / _TENSORS_PER_LAUNCH)
        elif op in _LOOKUP_OPS:
            traffic = 2 * written
        else:
            traffic = written + count * _read(shapes, dtypes)
            widens = autocast_ops.policy(op, "cuda") in autocast_ops.FP32_POLICIES
            if widens and row["autocast"] in autocast_dtypes() and _is_narrow(row["out_dtype"]):
                traffic *= 2  # CUDA casts its inputs and continues in FP32
        work.append((op, row["phase"], count, _number(row["flops"]), traffic, _is_narrow(dtypes[0])))
    return pd.DataFrame(work, columns=["op", "phase", "count", "flops", "bytes", "narrow"])


def as_fp32(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of a step under autocast, as in FP32: without casts, and with every 16-bit value in 32 bits."""
    rows = rows[rows["cast_by"].isna()].copy()
    narrow = rows["out_dtype"].map(_is_narrow)
    rows["out_bytes"] = rows["out_bytes"].astype(float) * np.where(narrow, 2.0, 1.0)
    for column in ("in_dtypes", "out_dtype"):
        rows[column] = rows[column].astype(object).str.replace(r"\bb?float16\b", "float32", regex=True)
    rows["autocast"] = None
    return rows


def as_autocast(work: pd.DataFrame) -> pd.DataFrame:
    """An estimate of FP32 work under autocast: matrix products in 16 bits with casts of their inputs, losses and norms
    in FP32, and all others half and half. The optimizer does not change."""
    result = work.copy()
    matrix = result["flops"] > 0
    policies = [autocast_ops.policy(op.removesuffix("_backward"), "cuda") for op in result["op"]]
    in_fp32 = [policy in autocast_ops.FP32_POLICIES for policy in policies]
    kept = result["phase"].eq("optimizer") | pd.Series(in_fp32, result.index, dtype=bool)
    share = np.where(matrix, 0.5, np.where(kept, 1.0, 0.75))
    result["bytes"] = result["bytes"] * share
    result["narrow"] = matrix
    casts = result[matrix].assign(op="_to_copy", flops=0.0, narrow=False)
    casts["bytes"] = casts["bytes"] * 0.5  # the output of a 16-bit product often feeds the next without a cast
    return pd.concat([result, casts], ignore_index=True)


def traces_of_run(run: Run) -> tuple[StepTrace, StepTrace]:
    """The traced step of a run in FP32 and under autocast. Raises `RunError` for a run without a traced step,
    and for one that emulates 8 or 4 bits."""
    if emulated(run):
        raise RunError(
            f"run {run.name!r} emulates {recipe(run)}, so its operators are those of the emulation; trace a run in bf16"
        )
    if not traced_steps(run) or not has_policies(run):
        raise RunError(
            f"run {run.name!r} has no traced step; record one with trace_ops=2 (on the command line --trace-ops) and "
            "forecast from it"
        )
    rows = traced_rows(run)
    steps = attempts(run)
    samples = median(steps["samples"].dropna())
    under_autocast = bool(rows["autocast"].isin(autocast_dtypes()).any())
    memory = _memory(run)
    own = device_work(rows)
    count = round(samples) if samples else None
    if under_autocast:
        wide = StepTrace(run.name, "fp32", True, count, device_work(as_fp32(rows)), _rescaled(memory, 1.6, 0.0))
        return wide, StepTrace(run.name, "amp", False, count, own, memory)
    copies = (memory.parameters or 0.0) / 2
    narrow = StepTrace(run.name, "amp", True, count, as_autocast(own), _rescaled(memory, 0.65, copies))
    return StepTrace(run.name, "fp32", False, count, own, memory), narrow


def _memory(run: Run) -> StepMemory:
    """The maximum of each category over the moments of the measured step."""
    if not memory_steps(run):
        return StepMemory()
    top = memory_moments(run)[["parameters", "gradients", "optimizer", "activations", "autocast"]].max()
    known = {name: None if math.isnan(value) else float(value) for name, value in top.items()}
    return StepMemory(
        known["parameters"], known["gradients"], known["optimizer"], known["activations"], known["autocast"] or 0.0
    )


def _rescaled(memory: StepMemory, factor: float, copies: float) -> StepMemory:
    """`memory` with other activations: under autocast they take between half and all of FP32's, mostly near 60 %."""
    activations = None if memory.activations is None else memory.activations * factor
    return StepMemory(memory.parameters, memory.gradients, memory.optimizer, activations, copies)


def _read(shapes: Sequence[Shape], dtypes: list[str]) -> float:
    """Bytes of the inputs of one call. The trace does not record which tensor has which dtype. So with two dtypes and
    two inputs the second has the last dtype; with more, inputs as large as the first have the first dtype."""
    sizes = [math.prod(shape) for shape in shapes]
    first, last = (element_bytes(dtypes[i]) or 4 for i in (0, -1))
    if len(sizes) == 2:
        return float(sizes[0] * first + sizes[1] * last)
    return float(sum(size * (first if size >= sizes[0] else last) for size in sizes))


def _number(value: Any, unknown: float = 0.0) -> float:
    """A cell as a number; `unknown` if it is null."""
    return unknown if value is None or math.isnan(value) else float(value)


def _is_narrow(dtype: object) -> bool:
    form = format_of(dtype)
    return form is not None and form.autocast
