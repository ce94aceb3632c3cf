"""The rule on quality: whether mixed precision learns as well as FP32, from audits and from a run in FP32."""

import numpy as np

from amp_core.analysis import compare
from amp_core.analysis.numerics.audits import own_audits
from amp_core.analysis.steps import autocast_dtype
from amp_core.findings.model import RANGE_AND_PRECISION, Entry, Finding
from amp_core.findings.registry import make_finding, paired_rule, rule
from amp_core.findings.remedies import compute_dtype
from amp_core.findings.signals import facts
from amp_core.findings.snippets import ISLAND
from amp_core.store.run import Run

MIN_COSINE = 0.99
"""Lowest acceptable median cosine of a gradient to its FP32 replay: its error is then a seventh of its length."""


_LOSS_GAP = Entry(
    code="amp-loss-gap",
    severity="warning",
    family=RANGE_AND_PRECISION,
    order=290,
    follows=(
        "gradient-underflow",
        "fp16-without-scaler",
        "activation-overflow",
        "loss-nonfinite",
    ),
    what="The model converges worse in mixed precision than in FP32.",
    signal="Final losses of two runs of the same task, compared with their noise; or gradients replayed in FP32.",
    threshold="Worse by more than 5 % and by more than the noise of both runs; or a gradient whose median cosine to "
    "FP32 is below 0.99, a relative error of one seventh.",
    advice="This model is sensitive to rounding. Keep the parts that the audit or the comparison names in float32, "
    "or train in bfloat16 or TF32.",
    snippet=ISLAND,
    page="compare",
)


@rule(_LOSS_GAP)
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
    if medians[worst] >= MIN_COSINE:
        return []
    return [
        make_finding(
            "amp-loss-gap",
            f"The gradient of {worst} deviates from its FP32 replay: cosine {medians[worst]:.3f}",
            worst,
            steps=(int(audits["step"].min()), int(audits["step"].max())),
            value=float(medians[worst]),
            limit=MIN_COSINE,
            unit="cosine",
        )
    ]


@paired_rule(_LOSS_GAP)
def amp_loss_gap_to(run: Run, baseline: Run) -> list[Finding]:
    """`amp-loss-gap`, compared with a run in FP32: the final loss is worse beyond the noise of both. Two runs in FP32
    differ in something other than their precision."""
    if compute_dtype(run) == "float32":
        return []
    comparison = compare([baseline, run])
    label = str(comparison.table["run"].iloc[1])
    if not comparison.parity[label].startswith("worse"):
        return []
    row = comparison.table.iloc[1]
    return [
        make_finding(
            "amp-loss-gap",
            f"The run converges worse than {baseline.name}{comparison.parity[label].removeprefix('worse')}",
            "loss",
            value=float(row["loss_ratio"]),
            limit=1.0,
            unit="times the final loss of the baseline",
        )
    ]
