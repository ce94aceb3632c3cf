"""The step cost of runs side by side: which parts shrank, which grew.

>>> changes = compare_step_cost([run_fp32, run_fp16])
>>> changes.loc[changes["verdict"] == "new", "label"].tolist()
['GEMM/conv, on tensor cores', 'casts']
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from amp_core.analysis.performance.step_cost import PARTS, PHASE_LABELS, phase_cost, step_cost
from amp_core.analysis.run_labels import unique_labels
from amp_core.schema import RunError
from amp_core.store.run import Run

SAME_COST_FRAC = 0.02
"""Parts that change by less than this share of the first run's step count as equal."""


def compare_step_cost(runs: Sequence[Run]) -> pd.DataFrame:
    """The step cost of each run beside that of the first, part by part.

    Columns: run (label), part, label, us, frac (of its own run), first_us, change_us (above 0: grew), change_frac (of
    the first run's step), verdict (`grew`, `shrank`, `same`, `new`, `gone`), per (`step`, `sample` where batch
    sizes differ, or `window` where no trace marks steps), source. Only with a profiled window in every run are kernels
    compared; otherwise the recorded phases of all. Raises `RunError` if there is no run.
    """
    if not runs:
        raise RunError("runs=[] is empty; give one run or more")
    costs = [step_cost(run) for run in runs]
    alike = {cost.source for cost in costs} == {"profile"} and len({cost.on_cpu for cost in costs}) == 1
    alike = alike and len({cost.steps == 0 for cost in costs}) == 1
    if not alike:
        costs = [phase_cost(run) for run in runs]
    counts = {cost.samples for cost in costs}
    by_sample = len(counts) > 1 and None not in counts and 0 not in counts
    names = {part: name for cost in costs for part, name in zip(cost.parts["part"], cost.parts["label"], strict=True)}
    order = [part for part in dict.fromkeys((*PARTS, *PHASE_LABELS)) if part in names]
    frames = []
    for label, cost in zip(unique_labels(runs), costs, strict=True):
        share = 1 / cost.samples if by_sample and cost.samples else 1.0
        parts = cost.parts.set_index("part")[["us", "frac"]].reindex(order).reset_index()
        parts[["us", "frac"]] = parts[["us", "frac"]].astype(float)
        parts["label"] = parts["part"].map(names)
        frames.append(parts.assign(run=label, us=parts["us"] * share, source=cost.source))
    table = pd.concat(frames, ignore_index=True)
    first = frames[0].set_index("part")["us"]
    table["first_us"] = table["part"].map(first).astype(float)
    table["change_us"] = table["us"].fillna(0.0) - table["first_us"].fillna(0.0)
    whole = float(first.sum())
    table["change_frac"] = table["change_us"] / whole if whole > 0 else np.nan
    table["verdict"] = [_change(*row) for row in table[["us", "first_us", "change_frac"]].itertuples(index=False)]
    table["per"] = "sample" if by_sample else "step" if costs[0].steps or not alike else "window"
    columns = ["run", "part", "label", "us", "frac", "first_us", "change_us", "change_frac", "verdict", "per", "source"]
    return table[columns]


def _change(us: float, first: float, change_frac: float) -> str:
    if not first > 0:  # NaN: not measured there
        return "new" if us > 0 else "same"
    if not us > 0:
        return "gone"
    return "same" if not abs(change_frac) >= SAME_COST_FRAC else "grew" if change_frac > 0 else "shrank"
