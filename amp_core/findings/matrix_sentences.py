"""What the first sentence says of products in a trace of a GPU: what they take, on which cores, and at what rate.

matrix_work(run, savings)   # MatrixWork(shares='55.0 %', where=', on tensor cores at 52.0 % of the peak rate')
"""

import re
from dataclasses import dataclass

import numpy as np
import pandas as pd

from amp_core.analysis.performance.blocks import WHOLE_GPUS, architecture
from amp_core.analysis.performance.eligible_ops import matrix_ops
from amp_core.analysis.performance.kernels import counted_once, kernel_rows
from amp_core.analysis.performance.matrix_kinds import MIN_KIND_FRAC, MatrixKinds, is_matrix, matrix_kinds
from amp_core.analysis.performance.product_savings import SLOW_PEAK_FRAC, moved_bytes
from amp_core.analysis.performance.saving import longest_name
from amp_core.analysis.performance.savings import Savings
from amp_core.analysis.performance.step_cost import MATRIX_PARTS
from amp_core.hardware.data_sheets import Rates, dense_rates
from amp_core.hardware.gpus import core_names
from amp_core.store.run import Run
from amp_core.text.formatting import percent

_TILE = r"(?<=[a-z0-9])_\d+x\d+"
"""The size of a tile in the names of kernels of Triton."""
_TILE_OF = re.compile(_TILE)
MIN_FAMILY_RATIO = 1.1
"""Time of kernels of one name but for what follows that size, over that of the longest, from which they are told."""
MIN_ON_CORES_FRAC = 0.95
"""Share of the time of products, of each kind, on tensor cores from which they are said to run there; and of that in
FP32, from which all are said to be."""


@dataclass(frozen=True)
class MatrixWork:
    """The products of a step."""

    kinds: MatrixKinds
    frac: float
    """Their share of the step."""
    shares: str
    """The same of each kind, in words."""
    where: str
    """`, on tensor cores` and at what rate, or `, in FP32`; empty if neither is so of nearly all."""
    kernel: str
    """Name of the kernel with most of their time; empty without one."""
    kernel_frac: float
    """Its share of the step."""
    family_frac: float = 0.0
    """That with the kernels whose names differ from its own in what follows the size of a tile; 0 without such."""
    of_largest_frac: float | None = None
    """Where the device is not named: the achieved rate over the peak of the largest GPU that the kernels are for."""

    @property
    def could_be_faster(self) -> str:
        """That they could be, where they are far below the peak of that GPU, as a sentence; else empty."""
        if self.of_largest_frac is None or self.of_largest_frac >= SLOW_PEAK_FRAC:
            return ""
        them = "it is" if len(self.kinds.fracs) == 1 else "they are"
        return f" So far below the peak, {them} what could be faster."


def matrix_work(run: Run, savings: Savings) -> MatrixWork:
    """What products take of a step of a trace."""
    cost, rows = savings.cost, counted_once(kernel_rows(run))
    us = float(np.nan_to_num(cost.us(*MATRIX_PARTS)))
    rows = rows[is_matrix(rows)]
    kinds = matrix_kinds(rows["total_us"], rows["category"] == "attention")
    its = "its" if len(kinds.fracs) == 1 else "their"
    cores, _ = core_names(cost.device_name)
    at, of_largest_frac = _rate(run, savings, rows, its)
    if savings.peak_frac is not None:
        of = _counted_alone(run, rows) if len(kinds.fracs) > 1 else ""
        at = f"{of} at {percent(savings.peak_frac)} of the peak rate"
    on = rows["total_us"].where(rows["tensor_core"] == "yes", 0.0).groupby(rows["category"] == "attention").sum()
    of_kinds = rows["total_us"].groupby(rows["category"] == "attention").sum()
    told = of_kinds >= MIN_KIND_FRAC * float(of_kinds.sum())
    on_cores = us > 0 and bool((on >= MIN_ON_CORES_FRAC * of_kinds)[told].all())
    in_fp32 = rows["total_us"][(rows["precision"] == "fp32") & (rows["tensor_core"] == "no")].sum()
    in_fp32 = us > 0 and in_fp32 >= MIN_ON_CORES_FRAC * rows["total_us"].sum()
    by_name = rows.groupby("name")["total_us"].sum()
    frac = us / cost.step_us
    by_family = by_name.groupby(by_name.index.str.split(_TILE, n=1, regex=True).str[0]).sum()
    family_us = float(by_family[_TILE_OF.split(str(by_name.idxmax()))[0]]) if len(by_name) else 0.0
    is_family = len(by_name) > 0 and family_us >= MIN_FAMILY_RATIO * float(by_name.max())
    return MatrixWork(
        kinds,
        frac,
        shares=" and ".join(percent(share * frac) for share in kinds.fracs),
        where=f", on {cores}{at}" if on_cores else ", in FP32" if in_fp32 else "",
        kernel=str(by_name.idxmax()) if len(by_name) else "",
        kernel_frac=float(by_name.max() / by_name.sum()) * frac if len(by_name) else 0.0,
        family_frac=family_us / float(by_name.sum()) * frac if is_family else 0.0,
        of_largest_frac=of_largest_frac,
    )


def _counted_alone(run: Run, rows: pd.DataFrame) -> str:
    """The one of two kinds of products of which operations can be counted, as part of a sentence; empty for both."""
    ops, of_attention = matrix_ops(run), set(rows["name"][rows["category"] == "attention"])
    is_attention = ops["kernel"].isin(of_attention)
    us, known_us = (of.groupby(is_attention)["total_us"].sum() for of in (ops, ops[ops["of_peak_frac"].notna()]))
    counted = {kind for kind, whole in us.items() if known_us.get(kind, 0.0) >= MIN_COUNTED_FRAC * whole}
    if len(counted) != 1:
        return ""
    return ", attention" if counted.pop() else ", GEMM/conv"


MIN_COUNTED_FRAC = 0.5
"""Share of the time of a kind of products whose operations are counted from which the rate is that of the kind."""


def _memory_frac(run: Run, rates: Rates) -> float:
    """The share of the memory's rate at which the products on tensor cores move their matrices, each once."""
    ops = matrix_ops(run)
    ops = ops[ops["tensor_core"] == "yes"]
    us, moved = float(ops["total_us"].sum()), sum(moved_bytes(row) for row in ops.to_dict("records"))
    return moved / (us * rates.gb_per_s * 1e3) if us > 0 else 0.0


def _rate(run: Run, savings: Savings, rows: pd.DataFrame, its: str) -> tuple[str, float | None]:
    """The achieved rate where no share of a peak is known, and why none is; of a device that is not named beside what
    the largest GPU reaches for which the kernels are compiled, and the share of that. `rows`: of these products."""
    if savings.flops_per_s is None:
        return f"; {its} operations cannot be counted from the trace, so {its} efficiency is unknown", None
    unnamed = savings.cost.device_name in ("", "GPU", "AMD GPU")
    made_for, largest = compiled_for(longest_name(rows, "name")) if unnamed else ("", "")
    rates = dense_rates(largest)
    peak = rates.peak(longest_name(rows, "precision")) if rates is not None else None
    if rates is not None and peak is not None:
        frac = savings.flops_per_s / (1e12 * peak)
        of_peak = f"{percent(frac)} of the peak of {largest}"
        of_memory = _memory_frac(run, rates)
        if of_memory > frac:  # little work per byte
            of_peak += f", and {percent(of_memory)} of the rate of its memory"
            frac = of_memory
        unnamed_but = f"the device is not named in the trace, and the kernels are compiled for {made_for}"
        return f" at {savings.flops_per_s / 1e12:.3g} TFLOP/s, {of_peak}; {unnamed_but}", frac
    why = "is not named in the trace" if unnamed else "has no data sheet here"
    return f" at {savings.flops_per_s / 1e12:.3g} TFLOP/s; the device {why}, so {its} efficiency is unknown", None


def compiled_for(kernel: str) -> tuple[str, str]:
    """The architecture that a kernel is compiled for by its name, and its largest GPU in words; empty for other names.
    Kernels for Ampere run on later GPUs too; those for Hopper and Blackwell use instructions of that architecture
    alone."""
    if amd := architecture(kernel):
        return amd, f"a whole {WHOLE_GPUS[amd]}"
    found = _NVIDIA.search(kernel)
    return (f"sm{found[1]}", _LARGEST[found[1]]) if found is not None else ("", "")


_NVIDIA = re.compile(r"(?i)(?<![a-z])sm_?(90|100|103)a?(?![0-9])")
_LARGEST = {"90": "an H100", "100": "a B200", "103": "a B300"}
"""The fastest GPU of an architecture, as one chip. An H20 has the same architecture as an H100 and a lower rate."""
