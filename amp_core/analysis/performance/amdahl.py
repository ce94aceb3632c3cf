"""Amdahl's law on the result of `step_cost`: how much faster matrix products alone could make a step.

    >>> amdahl(step_cost(run)).sentence
    'Amdahl limit: 1.8 × if GEMM/conv were free; 55 % of the time is not GEMM/conv.'

If a share p of the time becomes r times as fast, the whole becomes 1 / (1 − p + p / r) times as fast: 1 / (1 − p) at
most (Amdahl 1967). 16-bit values also halve the bytes that memory-bound kernels move, so autocast may give a little
more than matrix products alone; `halved_bound` includes that.
"""

from dataclasses import dataclass

import numpy as np

from amp_core.analysis.performance.step_cost import MATRIX_PARTS, StepCost
from amp_core.text.formatting import number


@dataclass(frozen=True)
class Amdahl:
    """How much faster a step could become: factors over the current step, 1 for no gain."""

    matrix_frac: float
    """Share of the time in matrix kernels."""
    cuda_core_frac: float
    """Share in matrix kernels on CUDA cores."""
    unknown_frac: float
    """Share in GEMM/conv kernels of which it is unclassified whether they use tensor cores."""
    bound: float
    """If all matrix kernels took no time. Infinite if there are no others."""
    cuda_core_bound: float
    """If the matrix kernels on CUDA cores took no time: the most that moving them to tensor cores can give."""
    tf32_frac: float
    """Share in matrix kernels on tensor cores whose inputs are TF32."""
    rate_ratio: float | None
    """Dense rate of 16-bit tensor cores over that of FP32 on CUDA cores, by the data sheet."""
    tf32_ratio: float | None
    """Dense rate of 16-bit inputs over that of TF32."""
    half_expected: float | None
    """If matrix kernels on CUDA cores became faster by `rate_ratio` and those in TF32 by `tf32_ratio`: all in 16 bits
    at the same share of the peak as now. None without a data sheet."""
    halved_bound: float
    """As `cuda_core_bound`, and memory-bound kernels took half as long because 16-bit values have half the bytes."""
    sentence: str
    """The bound in words."""


def amdahl(cost: StepCost) -> Amdahl | None:
    """The bound that Amdahl's law sets for matrix kernels; None without a profiled window.

    The r of a device is the ratio of its dense rates. Under autocast memory-bound kernels may gain too, up to
    twofold, since they move half the bytes: `halved_bound`.
    """
    if cost.source != "profile" or cost.step_us <= 0:
        return None
    ratio, tf32_ratio = cost.rate_ratio, cost.tf32_ratio
    matrix = min(1.0, cost.us(*MATRIX_PARTS) / cost.step_us)
    on_cuda_cores = min(1.0, cost.us("matrix") / cost.step_us)
    tf32 = min(1.0, cost.tf32_us / cost.step_us)
    expected = None
    if ratio is not None:
        gaining = max(0.0, on_cuda_cores - cost.narrow_us / cost.step_us)  # without what is in 16 bits already
        expected = 1 / (1 - gaining + gaining / ratio - tf32 + tf32 / (tf32_ratio or 1.0))
    memory = cost.us("memory_bound") / cost.step_us
    bound = _faster(matrix)
    rest = f"{100 * (1 - matrix):.0f} %"
    most = f"{number(bound, digits=2)} ×" if bound < 1e3 else "unbounded"
    sentence = f"Amdahl limit: {most} if GEMM/conv were free; {rest} of the time is not GEMM/conv."
    if matrix < 0.005:
        sentence = "Amdahl limit: 1 ×, because hardly any of the time is GEMM/conv."
    return Amdahl(
        matrix_frac=matrix,
        cuda_core_frac=on_cuda_cores,
        unknown_frac=min(1.0, cost.us("matrix_unknown") / cost.step_us),
        bound=bound,
        cuda_core_bound=_faster(on_cuda_cores),
        tf32_frac=tf32,
        rate_ratio=ratio,
        tf32_ratio=tf32_ratio,
        half_expected=expected,
        halved_bound=_faster(min(1.0, on_cuda_cores + memory / 2)),
        sentence=sentence,
    )


def _faster(share: float) -> float:
    """How many times as fast the whole becomes if `share` of it takes no time."""
    return 1 / (1 - share) if share < 1 else np.inf
