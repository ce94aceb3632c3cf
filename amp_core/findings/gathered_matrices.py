"""Matrices that are copied before they are multiplied by, where that is not the largest saving.

>>> gathered_matrices(run, savings).sentence
'aten::index and the products of batches that read its copies take 79 % of the profiled window: it copies a matrix of …'
"""

from amp_core.analysis.performance.saving import ProductSaving
from amp_core.analysis.performance.savings import Savings
from amp_core.findings.part import Part
from amp_core.store.run import Run


def gathered_matrices(_run: Run, savings: Savings) -> Part | None:
    """The copies of matrices that an operator gathers, with the products that read them; None where these take little,
    or where shapes were not recorded, and where they are the largest saving, which tells the same."""
    saving = savings.of("slow-products", ProductSaving)
    if saving is None or not saving.gathered_us or saving in savings.ranked[:1]:
        return None
    return Part(f"{saving.what} ({saving.how_much(savings.unit)}).", saving.gathered_us / saving.step_us, saving.where)
