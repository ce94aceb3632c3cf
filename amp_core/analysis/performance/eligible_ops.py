"""Matrix products that could have run on tensor cores, why they did not, and sizes that padding would help.

    >>> ops = matrix_ops(run)
    >>> ops.loc[ops["could"] == "yes", ["op", "sizes", "why", "time_frac"]]

Whether a kernel uses tensor cores depends on its inputs' precision, the device and the library's choice, but not on
sizes: since cuBLAS 11.0 and cuDNN 7.6.3 they support all sizes. They are most efficient if M, N and K are multiples of
16 bytes: 8 elements of FP16 or BF16, 4 of TF32, 16 of FP8 or INT8, 2 of FP64 (NVIDIA, "Matrix Multiplication Background
User's Guide", section 2.2, "Tensor Core Requirements", table 1). So alignment is a hint about speed, never the reason.
"""

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from amp_core.analysis.performance.gemm_shapes import (
    DEPTHWISE,
    WRAPPERS,
    Product,
    Shape,
    dtypes_of,
    format_sizes,
    is_matrix_op,
    padding_frac,
    plain_name,
    product,
    shapes_of,
    unaligned,
)
from amp_core.analysis.performance.gpus import profiled_gpu
from amp_core.analysis.performance.kernels import kernel_rows, on_cpu, window_rows
from amp_core.analysis.performance.matrix_kinds import is_matrix
from amp_core.formats import kernel_precision_of, memory_bits_of
from amp_core.hardware.data_sheets import dense_rates
from amp_core.hardware.gpus import PRECISIONS, Gpu, is_amd
from amp_core.hardware.kernel_names import masks_causally
from amp_core.store.run import Run

ALIGNED_BYTES = 16
"""Sizes that are multiples of this number of bytes are the most efficient (see above)."""

REASONS = {
    "on": ("", "runs on tensor cores"),
    "by-name": ("unknown", "unclassified: the kernel's name does not reveal it"),
    "no-tensor-cores": ("no", "this GPU has no tensor cores"),
    "vector": ("no", "matrix-vector product: memory-bound, so tensor cores would not help"),
    "depthwise": ("no", "depthwise convolution: no tensor-core implementation"),
    "fp64": ("no", "FP64, which this GPU's tensor cores do not support"),
    "dtype": ("no", "this GPU's tensor cores do not support these inputs"),
    "fp32": ("yes", "FP32 without TF32: allow TF32, or use autocast"),
    "tf32-left": ("yes", "a kernel without TF32 was chosen although TF32 was allowed: use autocast"),
    "fp32-early": ("yes", "FP32: before Ampere, tensor cores support only FP16, so use FP16 autocast"),
    "bf16-early": ("yes", "BF16 before Ampere: tensor cores support FP16 there, so use FP16 autocast"),
    "simt": ("yes", "a CUDA-core (SIMT) kernel was chosen although tensor cores support its inputs"),
    "no-dtype": ("unknown", "the precision of its inputs was not recorded"),
    "no-device": ("unknown", "the compute capability was not recorded"),
}
"""By reason: whether it could have run on tensor cores (yes, no, unknown; "" if it did), and why it did not."""

MINOR_FRAC = 0.1
"""Share of an operator's matrix time below which a kernel counts with the others, whatever its own answer."""

_WINDOW = ["step", "rank", "device"]
_KEYS = ["op", "module", "phase", "in_shapes", "in_dtypes"]
_COLUMNS = [
    *("op", "module", "phase", "kernel", "in_shapes", "in_dtypes", "precision", "tensor_core", "count", "total_us"),
    *("time_frac", "could", "reason", "why", "sizes", "unaligned", "padded", "padding_frac", "flops", "flops_per_s"),
    "of_peak_frac",
]


def matrix_ops(run: Run, step: int | None = None) -> pd.DataFrame:
    """Operators that multiply matrices, one row per operator × module × phase × input shapes × answer, longest first.

    An operator may launch several matrix kernels. Those that differ in their answer and take less than `MINOR_FRAC` of
    the operator's matrix time (tables of offsets, transforms) count with the others.

    op, module, phase, in_shapes, in_dtypes as recorded; kernel (that of most time); precision of its inputs;
    tensor_core (yes, no, unknown; "" on a CPU); count (calls, estimated from launches where these are not recorded);
    total_us (of its matrix kernels only, without casts and copies of the operator); time_frac (of all kernel time);
    could, reason, why: see `REASONS`, "" on a CPU; sizes (M, N, K in words); unaligned (sizes that 16 bytes do not
    divide, in words), padded (all sizes with those rounded up) and padding_frac (operations that padding adds, over
    those there were), "" and NaN if aligned; flops (of all calls, without those that a causal mask leaves out if the
    kernel's name or the operator's arguments tell one), flops_per_s, and of_peak_frac (of the data sheet's dense rate),
    NaN if the input shapes or the device are unknown.
    """
    return run.cached_frame(["kernels", "windows"], _matrix_ops, step)


def _matrix_ops(run: Run, step: int | None) -> pd.DataFrame:
    rows = kernel_rows(run, step)
    total = float(rows["total_us"].sum())
    cpu = on_cpu(rows)
    matrix = rows[is_matrix(rows)]
    if cpu:
        matrix = matrix[[is_matrix_op(op) and plain_name(op) not in WRAPPERS for op in matrix["op"]]]
        matrix = matrix[matrix["name"] == matrix["op"]]  # others serve it, as by a copy of its bias
    if matrix.empty:
        return pd.DataFrame(columns=_COLUMNS)
    outputs, allowed = _outputs(matrix), _tf32_allowed(run, matrix)
    named = window_rows(run, step)["device_name"]
    gpu = profiled_gpu(run, str(rows["device"].iloc[0]), str(named.iloc[0]) if len(named) else "")
    operators = _operators(matrix)
    records = [_row(record, gpu, outputs, allowed) for record in operators.to_dict("records")]
    table = pd.DataFrame(records)
    table["time_frac"] = table["total_us"] / total
    return table[_COLUMNS].sort_values("total_us", ascending=False, kind="stable").reset_index(drop=True)


def missed_tensor_core_time(ops: pd.DataFrame) -> pd.DataFrame:
    """Rows of `matrix_ops` that could run on tensor cores and do not, summed by reason: reason, why, ops, total_us,
    time_frac; the longest first."""
    could = ops[ops["could"] == "yes"]
    table = could.groupby(["reason", "why"], as_index=False, sort=False).agg(
        ops=("op", "size"), total_us=("total_us", "sum"), time_frac=("time_frac", "sum")
    )
    return table.sort_values("total_us", ascending=False, kind="stable").reset_index(drop=True)


def _operators(matrix: pd.DataFrame) -> pd.DataFrame:
    """Matrix kernels grouped by operator and answer: the columns of the kernel of most time, total_us, calls, launches,
    `causal` (those of causal calls), `convolved` (recorded operations of convolutions), and `answers` (number of
    answers for the same operator).

    Where calls are not recorded, each is taken to launch each of its matrix kernels once, so that the largest count of
    a kernel is their number.
    """
    matrix = matrix.sort_values("total_us", ascending=False, kind="stable")
    # Numbers of operators, windows and answers are grouped many times faster than their texts.
    operator = matrix.groupby(_KEYS, sort=False).ngroup()
    window = matrix.groupby(_WINDOW, sort=False, dropna=False).ngroup()
    by_answer = matrix["total_us"].groupby([operator, matrix["tensor_core"]], sort=False).transform("sum")
    whole = matrix["total_us"].groupby(operator, sort=False).transform("sum")
    main = operator[by_answer.sort_values(ascending=False, kind="stable").index].drop_duplicates()
    answer = operator.map(dict(zip(main, matrix["tensor_core"][main.index], strict=True)))
    matrix = matrix.assign(tensor_core=matrix["tensor_core"].where(by_answer >= MINOR_FRAC * whole, answer))
    row = matrix.groupby([operator, "tensor_core"], sort=False).ngroup()
    each = matrix["count"].groupby([row, window, matrix["name"]], sort=False).sum()
    calls = each.groupby(level=[0, 1], sort=False).max()
    recorded = matrix["op_calls"].groupby([row, window], sort=False).sum(min_count=1)
    calls = recorded.where(recorded > 0).fillna(calls)
    sums = matrix.groupby(row, sort=False).agg(
        us=("total_us", "sum"),
        launches=("count", "sum"),
        causal=("causal_count", "sum"),
        convolved=("convolution_flops", "sum"),
    )
    sums["calls"] = calls.groupby(level=0, sort=False).sum()
    longest = ~row.duplicated()
    table = matrix[longest].drop(columns=["total_us", "count", "causal_count", "convolution_flops"])
    table = table.reset_index(drop=True).join(sums)  # rows are numbered in this order
    table["answers"] = operator[longest].groupby(operator).transform("size").to_numpy()
    return table


def _row(
    kernel: Mapping[Hashable, Any], gpu: Gpu, outputs: dict[tuple[Shape, ...], int], tf32_allowed: frozenset[str]
) -> dict[str, Any]:
    """A row of `matrix_ops` from one of `_operators`."""
    key = {name: str(kernel[name]) for name in (*_KEYS, "tensor_core")}
    us = float(kernel["us"])
    precision = str(kernel["precision"]) or _precision(key["in_dtypes"])
    if key["tensor_core"] == "yes" and precision == "fp32" and not is_amd(gpu.name):
        precision = "tf32"  # FP32 inputs can only be TF32 there; AMD's matrix cores multiply FP32
    made = product(key["op"], key["in_shapes"])
    reason = _reason(key, str(kernel["name"]), made, precision, gpu) if key["tensor_core"] else ""
    by_cudnn = kernel["category"] == "conv" or (made is not None and made.kind == "rnn")
    if reason == "fp32" and ("cudnn" if by_cudnn else "matmul") in tf32_allowed:
        reason = "tf32-left"
    could, why = REASONS.get(reason, ("", ""))
    # A recurrent layer launches one kernel many times, so its calls are unknown; so is the share of each of two
    # answers.
    calls = float(kernel["launches"] if made is not None and made.kind == "rnn" else kernel["calls"])
    known = made is not None and kernel["answers"] == 1
    flops = float(kernel["convolved"]) if known else 0.0
    if made and known and not flops:
        flops = (made.flops or outputs.get(shapes_of(key["in_shapes"])[:2], 0)) * calls
    if made is not None:
        by_name = masks_causally(str(kernel["name"]))
        causal_frac = float(kernel["causal"]) / float(kernel["launches"]) if by_name is None else float(by_name)
        flops *= 1.0 - causal_frac * (1.0 - made.unmasked_frac)
    rate = flops / us * 1e6 if flops and us else np.nan
    rates = dense_rates(gpu.name) if key["tensor_core"] else None
    peak = (rates.peak(precision) if rates else None) or np.nan
    share = rate / (peak * 1e12)
    if share > 1:  # launches were not calls, or the clock was above the data sheet's: the number would be wrong
        flops, rate, share = np.nan, np.nan, np.nan
    wanted = _multiple(precision) or (8 if could == "yes" else 1)  # for FP32, the multiple of 16 bits
    padded = unaligned(made.sizes, wanted) if made and key["tensor_core"] and not made.is_vector else {}
    return key | {
        "kernel": kernel["name"],
        "precision": precision,
        "count": calls,
        "total_us": us,
        "could": could,
        "reason": reason,
        "why": why,
        "sizes": _sizes(made),
        "unaligned": format_sizes({name: made.sizes[name] for name in padded}) if made else "",
        "padded": format_sizes({**made.sizes, **padded}) if made and padded else "",
        "padding_frac": padding_frac(made, padded) if made and padded else np.nan,
        "flops": flops or np.nan,
        "flops_per_s": rate,
        "of_peak_frac": share,
    }


def _reason(key: dict[str, str], kernel: str, made: Product | None, precision: str, gpu: Gpu) -> str:
    """Which of `REASONS` applies to a row of a GPU."""
    if key["tensor_core"] == "yes":
        return "on"
    if gpu.has_tensor_cores is False:
        return "no-tensor-cores"
    if key["tensor_core"] == "unknown":
        return "by-name"
    if (made is not None and made.is_vector) or "gemv" in kernel:
        return "vector"
    if plain_name(key["op"]) in DEPTHWISE or (made is not None and made.sizes.get("C_in") == 1 < made.batch):
        return "depthwise"
    if not precision:
        return "no-dtype"
    if gpu.has_tensor_cores is None:
        return "no-device"
    if precision == "fp32":
        return "fp32" if gpu.takes("tf32") else "fp32-early"
    if gpu.takes(precision):
        return "simt"
    return {"fp64": "fp64", "bf16": "bf16-early"}.get(precision, "dtype")


def _tf32_allowed(run: Run, matrix: pd.DataFrame) -> frozenset[str]:
    """Where FP32 products may use TF32: `matmul`, and `cudnn` (convolutions, recurrent layers), which has its own flag.

    From the flags in the run's head or, for an imported run, from its kernels.
    """
    flags = run.head.environment.get("flags")
    flags_set = flags if isinstance(flags, dict) else {}
    used = set(matrix.loc[matrix["precision"] == "tf32", "category"])
    used_by_library = {"matmul": bool(used & {"gemm"}), "cudnn": bool(used & {"conv"})}
    return frozenset(
        library for library, used_tf32 in used_by_library.items() if flags_set.get(f"tf32_{library}", used_tf32) is True
    )


def _precision(in_dtypes: str) -> str:
    """Precision of an operator's inputs, if all floats (or bytes) agree; "" where not recorded."""
    known = {word for t in dtypes_of(in_dtypes) if (word := kernel_precision_of(t))}
    return known.pop() if len(known) == 1 else ""


def _outputs(matrix: pd.DataFrame) -> dict[tuple[Shape, ...], int]:
    """FLOPs of forward convolutions by their inputs, derived from their backward, which has the output's shape.

    Convolutions of equal inputs but unequal strides are left out.
    """
    flops_of_inputs: dict[tuple[Shape, ...], set[int]] = {}
    for op, shapes in matrix[["op", "in_shapes"]].drop_duplicates().itertuples(index=False):
        if plain_name(op) == "convolution_backward" and (made := product(op, shapes)) and made.flops:
            flops_of_inputs.setdefault(shapes_of(shapes)[1:3], set()).add(made.flops // 2)
    return {inputs: counts.pop() for inputs, counts in flops_of_inputs.items() if len(counts) == 1}


def _multiple(precision: str) -> int | None:
    """Elements of a precision in `ALIGNED_BYTES`; None for one that tensor cores do not multiply."""
    bits = memory_bits_of(precision) if precision in PRECISIONS else None
    return None if bits is None else ALIGNED_BYTES * 8 // bits


def _sizes(made: Product | None) -> str:
    if made is None or not made.sizes:
        return ""
    text = format_sizes(made.sizes)
    if made.kind == "attention":
        text = f"{format_sizes({'queries': made.queries or 0, 'keys': made.keys or 0})} · {text}"
    return f"{made.batch} × ({text})" if made.batch > 1 else text
