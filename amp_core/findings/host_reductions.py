"""Advice on collectives of the host that reduce: fewer calls where they are many, late ranks where bytes do not count.

>>> reductions_remedy(run).advice
'Nothing is computed meanwhile. Reduce less often, as gradients once for several batches.'
"""

import pandas as pd

from amp_core.analysis.performance.collectives import REDUCING, collective_rows, has_all_ranks, step_count
from amp_core.findings.model import Remedy
from amp_core.store.run import Run
from amp_core.text.formatting import size

MIN_MANY = 8.0
"""Reductions per step, one after the other, from which one call may replace several with a gain."""
MIN_BYTES_RATIO, MAX_LONGER_FRAC = 4.0, 0.25
"""Bytes of a reduction over those of the one before, and share of the time of that which it lasts beyond it, from which
bytes do not set how long they take: at the rate of the first, the second would last far longer."""
MIN_UNSET_FRAC = 0.5
"""Share of the time of all reductions in such pairs from which that is told."""
_SNIPPET = (
    "with model.no_sync():   # DistributedDataParallel, for all but the last of several batches\n"
    "    loss_of(model(batch)).backward()"
)


def reductions_remedy(run: Run) -> Remedy:
    """What to advise where ranks of a trace of CPUs reduce gradients or other values, and compute nothing meanwhile."""
    rows = collective_rows(run)
    rows = rows[rows["name"].isin(REDUCING) & (rows["total_us"] > 0)].sort_values(["rank", "ended_us"])
    less_often = "Nothing is computed meanwhile. Reduce less often, as gradients once for several batches"
    if unset := _unset_by_bytes(rows):
        traces = "" if has_all_ranks(run) else ": import the traces of all ranks"
        return Remedy(f"{unset} {less_often}, and look for late ranks{traces}.", _SNIPPET)
    together = ", and several tensors in one call" if len(rows) >= MIN_MANY * step_count(run) else ""
    return Remedy(f"{less_often}{together}.", _SNIPPET)


def _unset_by_bytes(rows: pd.DataFrame) -> str:
    """That reductions of very different sizes end together, as a sentence; empty for others. Their times count from
    when the one before has ended."""
    before = rows.groupby(["rank", "step"], dropna=False)[["message_bytes", "total_us"]].shift()
    larger = rows["message_bytes"] >= MIN_BYTES_RATIO * before["message_bytes"]
    pairs = larger & (rows["total_us"] <= MAX_LONGER_FRAC * before["total_us"])
    us = float((rows["total_us"] + before["total_us"])[pairs].sum())
    if us < MIN_UNSET_FRAC * float(rows["total_us"].sum()) or us <= 0:
        return ""
    small, large = float(before["message_bytes"][pairs].median()), float(rows["message_bytes"][pairs].median())
    return (
        f"One of {size(large)} ends with one of {size(small)}, or soon after, so neither bytes nor calls set how long "
        "they take: ranks that are late do, or the latency of many ranks."
    )
