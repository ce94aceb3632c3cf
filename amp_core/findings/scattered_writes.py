"""Operators that write to places that a tensor gives, if they take long.

>>> scattered(run, savings).sentence
'aten::index_put_ takes 34 % of the step, as it writes to scattered places.'
"""

from amp_core.analysis.performance.kernels import kernel_rows
from amp_core.analysis.performance.memory_savings import SCATTERS
from amp_core.analysis.performance.saving import step_share
from amp_core.analysis.performance.savings import Savings
from amp_core.findings.part import Part, steps_or_windows
from amp_core.store.run import Run
from amp_core.text.formatting import kernel_in_words


def scattered(run: Run, savings: Savings) -> Part | None:
    """The operator with most of the time among those that write to scattered places; None where none takes long."""
    rows = kernel_rows(run)
    rows = rows[rows["op"].str.contains(SCATTERS) & (rows["category"] != "communication")]
    us = rows.groupby("op")["total_us"].sum()
    each_us = float(us.max()) / steps_or_windows(run) if len(us) else 0.0
    if each_us < MIN_SCATTER_FRAC * savings.cost.step_us:
        return None
    name, share = str(us.idxmax()), step_share(each_us, savings.cost)
    told = f"{kernel_in_words(name)} takes {share} of the {savings.unit}, as it writes to scattered places."
    return Part(told, each_us / savings.cost.step_us, name)


MIN_SCATTER_FRAC = 0.1
"""Share of the step from which such an operator is told."""
