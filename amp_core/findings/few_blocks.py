"""What is said of kernels with fewer blocks than the GPU has multiprocessors, which memory does not bound.

>>> few_blocks_sentence(run, saving)
'47 % of this time is in kernels with fewer blocks than the GPU has multiprocessors, most in …'
"""

from amp_core.analysis.performance.few_blocks import few_blocks, multiprocessors
from amp_core.analysis.performance.saving import MemorySaving
from amp_core.findings.channels_last import on_amd
from amp_core.store.run import Run
from amp_core.text.formatting import kernel_in_words

MIN_FEW_BLOCKS_FRAC = 0.2
"""Share of such kernels in what fusing would save from which they are told."""


def few_blocks_sentence(run: Run, saving: MemorySaving) -> str:
    """The share and the longest of such kernels, and what helps, as sentences; empty where they are little."""
    if saving.few_blocks_frac < MIN_FEW_BLOCKS_FRAC:
        return ""
    name, op = saving.few_blocks_of
    units = multiprocessors(run, str(run.head.config.get("device") or ""))
    per_unit = few_blocks(run).get((name, op), (0.0, 0.0))[1]
    kind = "compute units" if on_amd(run) else "multiprocessors"
    count = f" ({per_unit * units:,.0f} on average for {units})" if units and per_unit else ""
    return (
        f"{100 * saving.few_blocks_frac:.0f} % of this time is in kernels with fewer blocks than the GPU has {kind}, "
        f"most in {kernel_in_words(name)}{count}: part of the GPU has no work, so memory does not bound them, and "
        "kernels that split their sums over more blocks help, as a compiler's do."
    )
