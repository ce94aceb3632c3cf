"""Rules on quality and on two runs of one task: does mixed precision learn as well, and is it smaller?"""

from collections.abc import Callable

import numpy as np

from amp_core.analysis import compare
from amp_core.analysis.audits import own_audits
from amp_core.findings._found import found
from amp_core.findings._signals import autocast_dtype, facts
from amp_core.findings.memory import memory_not_lower_than
from amp_core.findings.model import Finding
from amp_core.findings.remedies import computes_in
from amp_core.run import Run

COSINE = 0.99
"""Median cosine of a gradient to its FP32 replay below which it points elsewhere: the error is then a seventh of it."""


def amp_loss_gap(run: Run) -> list[Finding]:
    """`amp-loss-gap`, from audits: a matrix's gradient at the run's own loss scale differs from its FP32 replay."""
    audits = own_audits(run)
    if audits.empty or autocast_dtype(run) is None:
        return []
    shapes = facts(run.head.model, "shapes")
    matrix = [len(shape) > 1 if isinstance(shape := shapes.get(n), list) else True for n in audits["name"]]
    audits = audits[np.array(matrix, dtype=bool) & audits["cosine"].notna().to_numpy()]
    if audits.empty:
        return []
    medians = audits.groupby("name")["cosine"].median()
    worst = str(medians.idxmin())
    if medians[worst] >= COSINE:
        return []
    return [
        found(
            "amp-loss-gap",
            f"The gradient of {worst} differs from its FP32 replay: cosine {medians[worst]:.3f}",
            worst,
            steps=(int(audits["step"].min()), int(audits["step"].max())),
            value=float(medians[worst]),
            limit=COSINE,
            unit="cosine",
        )
    ]


def amp_loss_gap_to(run: Run, baseline: Run) -> list[Finding]:
    """`amp-loss-gap`, against a run in FP32: the final loss is worse beyond the noise of both. Two runs in FP32
    differ in something else than their precision."""
    if computes_in(run) == "float32":
        return []
    comparison = compare([baseline, run])
    label = str(comparison.table["run"].iloc[1])
    if not comparison.parity[label].startswith("worse"):
        return []
    row = comparison.table.iloc[1]
    return [
        found(
            "amp-loss-gap",
            f"The run learns worse than {baseline.name}{comparison.parity[label].removeprefix('worse')}",
            "loss",
            value=float(row["loss_ratio"]),
            limit=1.0,
            unit="times the final loss of the baseline",
        )
    ]


PAIRED: tuple[Callable[[Run, Run], list[Finding]], ...] = (amp_loss_gap_to, memory_not_lower_than)
"""Rules that hold a run against another one of the same task in FP32."""
