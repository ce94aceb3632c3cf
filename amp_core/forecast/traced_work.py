"""Input of a forecast: the operators of one step in FP32 and under autocast, and its memory.

>>> wide, narrow = traces_of_run(run)
>>> wide.work.columns
Index(['op', 'phase', 'count', 'flops', 'bytes', 'narrow', 'kind', 'batch', 'm', 'n', 'k',
       'transposed', 'sm_us', 'serial_us', 'winograd_flops', 'winograd_bytes'], dtype='object')

A run is traced in one recipe; its step in the other recipe is derived. From autocast to FP32 this is exact except for
fused kernels: 16-bit values become 32-bit ones and the casts disappear. From FP32 to autocast it is an estimate: which
operators between matrix products run in 16 bits depends on their inputs, so they count as half and half.
"""

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from amp_core.analysis import memory_moments, memory_steps
from amp_core.analysis.performance.gemm_shapes import Shape, product, shapes_of, tensor_shapes
from amp_core.analysis.performance.traced_ops import has_policies, traced_rows, traced_steps
from amp_core.analysis.steps import attempts, emulated, median, recipe
from amp_core.forecast.kernel_classes import (
    BATCH_NORM_US,
    DEPTHWISE_BACKWARD_FRAC,
    DEPTHWISE_FLOP_PER_US,
    LAYER_NORM_ROW_US,
    SCATTERED_PER_US,
    aligned_elements,
    is_scattered,
    kernel_class,
    winograd_work,
)
from amp_core.formats import autocast_dtypes, element_bytes, format_of
from amp_core.hardware import autocast_ops
from amp_core.schema import RunError
from amp_core.store.run import Run

_SIZES = ("batch", "m", "n", "k")
_OTHERS = ("transposed", "sm_us", "serial_us", "winograd_flops", "winograd_bytes", "aligned")
_COLUMNS = ["op", "phase", "count", "flops", "bytes", "narrow", "kind", *_SIZES, *_OTHERS]
TENSORS_PER_LAUNCH = 36
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
    peak: float | None = None
    """The most that all tensors of the step held at once, temporaries too, where the step was traced for it."""
    peak_per_sample: float | None = None
    """By how much the peak grows with each further sample; None where not traced."""
    refused: str | None = None
    """The model's error at a batch of twice the size, where it has one: `peak_per_sample` is then not known."""


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
    moved by its kernels), narrow (multiplies 16-bit factors), kind (of `BANDWIDTH_SHARES`, `product` or `attention`);
    batch, m, n, k (sizes of the product, NaN where not known), transposed (bytes that cuDNN moves to bring a
    convolution that is not channels last into the layout of tensor cores), sm_us (time of one multiprocessor, if it did
    all alone), serial_us (time that no multiprocessor shortens), winograd_flops and winograd_bytes (of the products and
    of the transforms, if `winograd_work` replaces the convolution; else 0), aligned (elements that one load of a
    matrix product takes; 0 for what is none)."""
    memory: StepMemory


def device_work(rows: pd.DataFrame, channels_last: bool = False) -> pd.DataFrame:
    """Rows of the table `ops` as work on a CUDA device; `channels_last` tells the memory format of convolutions.

    Operators that autocast leaves in 16 bits on a CPU but runs in FP32 on CUDA (softmax, norms, losses) count as FP32.
    """
    work = []
    for row in _with_fused_kernels(rows):
        op = str(row["op"]).removeprefix("aten::")
        count = round(_number(row["count"], 1.0))
        written = _number(row["out_bytes"])
        flops = _number(row["flops"])
        shapes = tensor_shapes(row["in_shapes"]) if isinstance(row["in_shapes"], str) else ()
        dtypes = str(row["in_dtypes"] or "").split(", ")
        runs = kernel_class(op, flops)
        kind, transposed = runs.kind, 0.0
        sizes: tuple[float, ...] = (math.nan,) * 4
        sm_us, serial_us, winograd, aligned = 0.0, 0.0, (0.0, 0.0), 0.0
        narrow = _is_narrow(dtypes[0])
        if not shapes:  # the optimizer's operators: multi-tensor kernels on CUDA
            traffic, count = _OPTIMIZER_PASSES * written, math.ceil(count / TENSORS_PER_LAUNCH)
        elif kind == "lookup":
            traffic = 2 * written
        else:
            traffic = runs.passes * (written + count * _read(shapes, dtypes))
            widens = autocast_ops.policy(op, "cuda") in autocast_ops.FP32_POLICIES
            if widens and row["autocast"] in autocast_dtypes() and narrow:
                traffic *= 2  # CUDA casts its inputs and continues in FP32
            if not flops and is_scattered(op, kind, shapes, dtypes):
                sm_us = count * runs.passes * max(map(math.prod, shapes)) / SCATTERED_PER_US
        if flops and isinstance(row["in_shapes"], str):
            kind, sizes = _product(op, row["in_shapes"], flops / count)
            if kind == "depthwise":
                speed = 2.0 if narrow else DEPTHWISE_BACKWARD_FRAC if op.endswith("backward") else 1.0
                sm_us, narrow = flops / DEPTHWISE_FLOP_PER_US / speed, False
            if "conv" in op and kind == "product":
                transposed = 0.0 if channels_last else 2 * traffic
                winograd = winograd_work(shapes, sizes, flops)
            elif kind == "product" and not any(map(math.isnan, sizes)):
                aligned = float(aligned_elements(sizes[1:]))
        if "batch_norm" in op and shapes and all(map(_is_narrow, dtypes)):  # in FP16 weights too, so not cuDNN's
            serial_us = count * BATCH_NORM_US * math.prod(shapes[0]) / shapes[0][1]
        work.append(
            (
                op,
                row["phase"],
                count,
                flops,
                traffic,
                narrow,
                kind,
                *sizes,
                transposed,
                sm_us,
                serial_us,
                *winograd,
                aligned,
            )
        )
        if op == "native_layer_norm_backward" and len(shapes) > 4:  # a second kernel for the weight's gradient
            serial_us = count * LAYER_NORM_ROW_US * math.prod(shapes[2])  # shapes: gradient, input, mean, …, weight
            moved = traffic * 2 / 3
            work.append((op, row["phase"], count, 0.0, moved, narrow, kind, *sizes, 0.0, 0.0, serial_us, 0.0, 0.0, 0.0))
    return pd.DataFrame(work, columns=_COLUMNS)


def _with_fused_kernels(rows: pd.DataFrame) -> Iterator[dict[Hashable, Any]]:
    """The rows without what CUDA's kernels do on the way: dropout draws and scales its mask itself, and a softmax under
    autocast reads 16 bits and writes 32, the other way round in its backward."""
    drawn = set(rows.loc[rows["op"].eq("aten::bernoulli_"), "in_shapes"].dropna())
    softmax = rows["op"].str.startswith(("aten::_softmax", "aten::_log_softmax"))
    normalized = {shapes_of(text)[0] for text in rows.loc[softmax, "in_shapes"].dropna()}
    for row in rows.to_dict("records"):
        op, shapes = row["op"], row["in_shapes"]
        mask = op in ("aten::bernoulli_", "aten::div_") and shapes in drawn and row["phase"] == "forward"
        cast = (
            op == "aten::_to_copy" and isinstance(shapes, str) and shapes_of(shapes)[:1] in {(s,) for s in normalized}
        )
        if cast:
            cast = _is_narrow(row["out_dtype"]) == (row["phase"] == "backward")
        if not mask and not cast:
            yield row


def _product(op: str, in_shapes: str, flops: float) -> tuple[str, tuple[float, ...]]:
    """The kind of a product, and its batch, m, n and k; a convolution's are those of its implicit matrix product."""
    shape = product(op, in_shapes)
    if shape is None or shape.kind not in ("gemm", "conv"):
        return ("attention" if shape is not None and shape.kind == "attention" else "product"), (math.nan,) * 4
    if shape.kind == "gemm":
        return "product", (shape.batch, shape.sizes["M"], shape.sizes["N"], shape.sizes["K"])
    shapes = shapes_of(in_shapes)
    backward = op.endswith("backward")
    weight = shapes[2 if backward else 1]
    if shape.batch > 1 and weight[1] == 1:
        return "depthwise", (math.nan,) * 4
    n, k = shape.sizes["C_out"], shape.sizes["C_in"] * math.prod(weight[2:])
    positions = math.prod(shapes[0]) / shapes[0][1] if backward else flops / (2 * shape.batch * n * k)
    return "product", (shape.batch, positions, n, k)


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
    result["narrow"] = matrix & result["kind"].ne("depthwise")
    result["sm_us"] = result["sm_us"] * np.where(matrix, 0.5, 1.0)
    casts = result[matrix].assign(op="_to_copy", flops=0.0, narrow=False, kind="copy", transposed=0.0, sm_us=0.0)
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
    channels_last = run.head.config.get("channels_last") is not False  # unknown of a watched loop
    own = device_work(rows, channels_last)
    count = round(samples) if samples else None
    if under_autocast:
        wide = StepTrace(
            run.name, "fp32", True, count, device_work(as_fp32(rows), channels_last), _rescaled(memory, 1.6, 0.0)
        )
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
