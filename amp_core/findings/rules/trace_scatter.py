"""The rule on imported traces: operators that write to scattered places."""

from amp_core.analysis.performance.savings import possible_savings
from amp_core.findings.model import SPEED_AND_MEMORY, Entry, Finding, Remedy
from amp_core.findings.registry import make_finding, rule
from amp_core.findings.scattered_writes import MIN_SCATTER_FRAC, scattered
from amp_core.findings.trace_findings import for_what_runs
from amp_core.store.run import Run


@rule(
    Entry(
        code="scattered-writes",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=423,
        what="An operator of an imported trace that writes to places which a tensor gives takes long.",
        signal="Time of `index_put_`, `index_add_`, `scatter` and of an embedding's backward.",
        threshold=f"{100 * MIN_SCATTER_FRAC:.0f} % of the step.",
        advice="Writes to scattered places reach a fraction of the memory's rate, and those to the same place wait for "
        "one another. Where each place is written once, read by the inverse index instead; else sort the indices.",
        snippet="y = x[inverse]   # a gather, instead of y[index] = x",
        page="step-cost",
    )
)
def scattered_writes(run: Run) -> list[Finding]:
    """`scattered-writes`: an operator bound by random access."""
    savings = possible_savings(run)
    writes = scattered(run, savings) if savings is not None else None
    if writes is None:
        return []
    finding = make_finding(
        "scattered-writes",
        writes.sentence.rstrip("."),
        writes.where,
        value=writes.frac,
        limit=MIN_SCATTER_FRAC,
        unit="share of the step",
        remedy=_EMBEDDING if "embedding" in writes.where else None,
    )
    return [for_what_runs(run, finding)]


_EMBEDDING = Remedy(
    "The gradients of rows that repeat in a batch are added one after another, most often those of padding. Give the "
    "embedding its padding_idx, whose row gets no gradient, or let it have sparse gradients.",
    "embedding = torch.nn.Embedding(rows, size, padding_idx=0)",
)
