"""Low-rank adapters (LoRA) that a server computes beside the weights, if they take long.

>>> adapters(run, savings).sentence
'Low-rank adapters (LoRA) take at least 12 % of the step in kernels of their own: merged into the weights they …'
"""

from amp_core.analysis.performance.kernels import kernel_rows
from amp_core.analysis.performance.saving import MIN_SAVED_FRAC, step_share
from amp_core.analysis.performance.savings import Savings
from amp_core.findings.part import Part, steps_or_windows
from amp_core.store.run import Run


def adapters(run: Run, savings: Savings) -> Part | None:
    """The kernels that servers name after adapters, as vLLM, SGLang and punica; None where they take little."""
    rows = kernel_rows(run)
    rows = rows[rows["name"].str.contains(_OF_ADAPTERS)]
    each_us = float(rows["total_us"].sum()) / steps_or_windows(run)
    if each_us < MIN_SAVED_FRAC * savings.cost.step_us:
        return None
    share = step_share(each_us, savings.cost)
    return Part(
        f"Low-rank adapters (LoRA) take at least {share} of the {savings.unit} in kernels of their own: merged into "
        "the weights they take none, where all requests use one.",
        each_us / savings.cost.step_us,
        it="them",
        least=MIN_SAVED_FRAC,
    )


_OF_ADAPTERS = r"(?i)(?:^|_)lora_|(?<![a-z])(?:bgmv|sgmv)_"
