"""Kernels whose grid has fewer blocks than the GPU has multiprocessors: memory does not bound them.

>>> few = few_blocks(run)
>>> few_blocks_us(rows, few).sum()
1016.0
"""

from collections.abc import Mapping

import pandas as pd

from amp_core.analysis.performance.memory_rate import MIN_LONG_US
from amp_core.store.run import Run

FewBlocks = Mapping[tuple[str, str], tuple[float, float]]
"""By the names of a kernel and its operator, empty without one: the share of its time in launches with fewer blocks
than the GPU has multiprocessors, and how many blocks per multiprocessor these have on average over their time."""


def few_blocks(run: Run) -> FewBlocks:
    """Such kernels among those of at least `MIN_LONG_US`, by the step in `timeline`. A shorter one takes little more
    than its launch."""
    frame = run.timeline
    frame = frame[frame["blocks_per_sm"].notna()]
    if frame.empty:
        return {}
    us, blocks = frame["total_us"].astype(float), frame["blocks_per_sm"].astype(float)
    few_us = us.where((blocks < 1) & (us >= MIN_LONG_US), 0.0)
    frame = frame.assign(op=frame["op"].fillna(""), us=us, few_us=few_us, weighted=few_us * blocks)
    sums = frame.groupby(["name", "op"])[["us", "few_us", "weighted"]].sum()
    sums = sums[sums["few_us"] > 0]
    return {
        (str(name), str(op)): (few / whole, weighted / few)
        for (name, op), whole, few, weighted in zip(sums.index, *(sums[c] for c in sums), strict=True)
    }


def few_blocks_us(rows: pd.DataFrame, few: FewBlocks) -> "pd.Series[float]":
    """By row of `kernels`: its time in such launches, microseconds."""
    shares = [few.get(key, (0.0, 0.0))[0] for key in zip(rows["name"], rows["op"], strict=True)]
    return rows["total_us"] * pd.Series(shares, index=rows.index, dtype=float)


def multiprocessors(run: Run, device: str) -> int:
    """How many multiprocessors a device of a trace has; 0 if that is not known."""
    gpus, number = run.head.environment.get("gpus"), device.partition(":")[2]
    index = int(number) if number.isdecimal() and len(number) < 4 else 0
    listed = gpus if isinstance(gpus, list) else []
    about = listed[index] if index < len(listed) else listed[0] if listed else {}
    given = about.get("multiprocessors") if isinstance(about, dict) else None
    return given if isinstance(given, int) and given > 0 else 0
