"""Rules on memory that autocast does not reduce, from one run and compared with a run in FP32."""

from amp_core.analysis.performance.memory import memory_summary
from amp_core.analysis.steps import autocast_dtype
from amp_core.findings.model import SPEED_AND_MEMORY, Entry, Finding
from amp_core.findings.registry import make_finding, paired_rule, rule
from amp_core.findings.signals import on_gpu
from amp_core.hardware.device_types import is_accelerator
from amp_core.store.run import Run

MIN_STATE_FRAC = 0.8
"""Share of weights, gradients and optimizer state in memory from which halving activations saves little."""
SAME_PEAK_FRAC = 0.05
"""Peaks of memory that differ by less count as equal."""


_NOT_LOWER = Entry(
    code="memory-not-lower",
    severity="warning",
    family=SPEED_AND_MEMORY,
    order=500,
    what="Mixed precision does not reduce peak memory.",
    signal="Memory by category, or the peak compared with that of an FP32 run.",
    threshold="Weights, gradients and optimizer state, which autocast keeps in FP32, make up 80 % of the peak or "
    "more; or the peak is within 5 % of the FP32 run's.",
    advice="Autocast only halves activations, and adds 16-bit copies of the weights. Reduce the largest part, with "
    "an 8-bit optimizer, sharding or checkpointing, or use the free memory for larger batches.",
    snippet="from torch.utils.checkpoint import checkpoint\n\ny = checkpoint(block, x, use_reentrant=False)",
    page="memory",
)


@rule(_NOT_LOWER)
def memory_not_lower(run: Run) -> list[Finding]:
    """`memory-not-lower`: weights, gradients and optimizer state are most of a GPU's memory under autocast."""
    if autocast_dtype(run) is None or not len(run.memory):
        return []
    frame = run.memory
    parts = ["parameters_bytes", "gradients_bytes", "optimizer_bytes"]
    frame = frame[frame["device"].map(is_accelerator).astype(bool) & frame["allocated_bytes"].notna()]
    if frame.empty:
        return []
    peak = float(memory_summary(run).peak_bytes or frame["allocated_bytes"].max())
    sizes = frame[parts].astype(float).fillna(0.0).max()
    share = float(sizes.sum()) / peak if peak else 0.0
    if share < MIN_STATE_FRAC:
        return []
    where = str(sizes.idxmax()).removesuffix("_bytes")
    return [
        make_finding(
            "memory-not-lower",
            f"{100 * share:.0f} % of peak memory is weights, gradients and optimizer state, which autocast leaves in "
            "FP32",
            where,
            value=share,
            limit=MIN_STATE_FRAC,
            unit="share of peak memory",
        )
    ]


@paired_rule(_NOT_LOWER)
def memory_not_lower_than(run: Run, baseline: Run) -> list[Finding]:
    """`memory-not-lower`, against a run in FP32: the peak on the GPU is as high."""
    if autocast_dtype(run) is None or not on_gpu(run) or not on_gpu(baseline) or memory_not_lower(run):
        return []
    peak, before = memory_summary(run).peak_bytes, memory_summary(baseline).peak_bytes
    if not peak or not before or peak < (1 - SAME_PEAK_FRAC) * before:
        return []
    return [
        make_finding(
            "memory-not-lower",
            f"Peak memory is {100 * peak / before:.0f} % of that of {baseline.name}",
            "peak memory",
            value=peak / before,
            limit=1 - SAME_PEAK_FRAC,
            unit="times the peak of the baseline",
        )
    ]
