"""Low-rank adapters (LoRA) that a server computes beside the weights, if they take long.

>>> adapters(run, savings).sentence
'Low-rank adapters (LoRA) take at least 12 % of the step in kernels of their own: merged into the weights they …'
"""

import numpy as np

from amp_core.analysis.performance.kernels import kernel_rows
from amp_core.analysis.performance.saving import MIN_SAVED_FRAC, step_share
from amp_core.analysis.performance.savings import Savings
from amp_core.findings.part import Part, steps_or_windows
from amp_core.hardware.kernel_names import GEMM_CATEGORIES
from amp_core.store.run import Run


def adapters(run: Run, savings: Savings) -> Part | None:
    """The kernels that servers name after adapters, as vLLM, SGLang and punica; None where they take little."""
    rows = kernel_rows(run)
    rows = rows[rows["name"].str.contains(_OF_ADAPTERS)]
    behind_ratio = _behind_ratio(run) if len(rows) else 0.0
    each_us = float(rows["total_us"].sum()) * (1 + behind_ratio) / steps_or_windows(run)
    if each_us < MIN_SAVED_FRAC * savings.cost.step_us:
        return None
    and_behind = ", and in products of other names that these lead to" if behind_ratio else ""
    share = step_share(each_us, savings.cost)
    return Part(
        f"Low-rank adapters (LoRA) take at least {share} of the {savings.unit} in kernels of their own{and_behind}: "
        "merged into the weights they take none, where all requests use one.",
        each_us / savings.cost.step_us,
        it="them",
        least=MIN_SAVED_FRAC,
    )


def _behind_ratio(run: Run) -> float:
    """The time of what the first products of adapters lead to over that of all kernels named after adapters, in the
    step of `timeline`. The first product shrinks its input to the adapter's rank, and a second one expands the result.
    Where none named after adapters follows before the next shrinking one on its stream, as for experts, the product
    right behind it is the second, and the few kernels between the two prepare it."""
    frame = run.timeline.sort_values(["rank", "device", "stream", "start_us"], kind="stable")
    named = frame["name"].str.contains(_OF_ADAPTERS).to_numpy(dtype=bool)
    shrinks = named & frame["name"].str.contains("shrink", regex=False).to_numpy(dtype=bool)
    if not shrinks.any():
        return 0.0
    place = frame.groupby(["rank", "device", "stream"], dropna=False).ngroup().to_numpy()
    of_layers = frame["category"].isin(_OF_LAYERS).to_numpy()
    products, us = frame["category"].isin(GEMM_CATEGORIES).to_numpy(), frame["total_us"].to_numpy(dtype=float)
    starts = np.flatnonzero(shrinks)
    behind_us = 0.0
    for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(frame)], strict=True):
        until = min(end, int(np.searchsorted(place, place[start], side="right")))
        after = np.flatnonzero(products[start + 1 : until])
        if not len(after) or after[0] > MAX_BETWEEN or named[start + 1 : until].any():
            continue
        second = start + 1 + int(after[0])
        if not of_layers[start + 1 : second].any():
            behind_us += float(us[start + 1 : second + 1].sum())
    return behind_us / float(us[named].sum())


MAX_BETWEEN, _OF_LAYERS = 8, ("attention", "communication", "norm", "optimizer")
"""Kernels between the two products at most, as those that sort tokens by expert and adapter, and kinds of which none is
among them: what comes after these is another layer's."""
_OF_ADAPTERS = r"(?i)(?:^|_)lora_|(?<![a-z])(?:bgmv|sgmv)_"
