"""Low-rank adapters (LoRA) that a server computes beside the weights, if they take long.

>>> adapters(run, savings).sentence
'Low-rank adapters (LoRA) take 12 % of the step in kernels of their own: merged into the weights they take none, …'
"""

from dataclasses import dataclass

from amp_core.analysis.performance.kernels import kernel_rows, window_rows
from amp_core.analysis.performance.saving import MIN_SAVED_FRAC, step_share
from amp_core.analysis.performance.savings import Savings
from amp_core.store.run import Run


@dataclass(frozen=True)
class Adapters:
    """The kernels of adapters."""

    frac: float
    """Their share of the step."""
    sentence: str


def adapters(run: Run, savings: Savings) -> Adapters | None:
    """The kernels that servers name after adapters, as vLLM, SGLang and punica; None where they take little."""
    rows, windows = kernel_rows(run), window_rows(run)
    rows = rows[rows["name"].str.contains(_OF_ADAPTERS)]
    steps = float(windows["steps"].fillna(0.0).sum()) or float(len(windows))
    each_us = float(rows["total_us"].sum()) / steps
    if each_us < MIN_SAVED_FRAC * savings.cost.step_us:
        return None
    share = step_share(each_us, savings.cost)
    return Adapters(
        each_us / savings.cost.step_us,
        f"Low-rank adapters (LoRA) take {share} of the {savings.unit} in kernels of their own: merged into the weights "
        "they take none, where all requests use one.",
    )


_OF_ADAPTERS = r"(?i)(?:^|_)lora_|(?<![a-z])(?:bgmv|sgmv)_"
