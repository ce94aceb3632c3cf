"""Whether a trace is one of training, and what of it the optimizer launches.

>>> in_training(run, kernel_rows(run))
True
"""

import pandas as pd

from amp_core.store.run import Run

FUSED_OPTIMIZERS = ("Adam", "AdamW", "SGD", "Adagrad")
"""Those of torch that take `fused=True`."""


MIN_BACKWARD_FRAC = 0.1
"""Share of backward in the time or in the number of kernels from which a program trains though no optimizer runs, no
gradient is accumulated as by `backward()`, and none is of a layer: a simulation may ask for the gradient of a few
operators."""
_OF_LAYERS = r"(?:Addmm|\bMm|Linear|Convolution\w*|(?:Batch|Layer|Group|Rms|RMS)Norm|Embedding)Backward"
"""Backward of operators with parameters."""


def in_training(run: Run, rows: pd.DataFrame) -> bool:
    """Whether rows of kernels are of a training: with an optimizer, or with enough of backward."""
    if (rows["phase"] == "optimizer").any():
        return True
    back = rows["phase"] == "backward"
    of_layers = rows["top_op"].str.contains(_OF_LAYERS)
    if run.head.config.get("accumulates_gradients") is True or (back & of_layers).any():
        return bool(back.any())
    parts = [rows[name].astype(float) for name in ("total_us", "count")]
    return any(part[back].sum() >= MIN_BACKWARD_FRAC * part.sum() > 0 for part in parts)


ZEROING = ("aten::zero_", "aten::_foreach_zero_")
"""Operators of `zero_grad(set_to_none=False)`, which fill tensors that exist already."""


def optimizer_frac(rows: pd.DataFrame) -> float:
    """The share of the optimizer in the launches of kernels, without the fills of gradients."""
    stepping = (rows["phase"] == "optimizer") & ~rows["top_op"].isin(ZEROING)
    return float(rows["count"][stepping].sum() / max(1.0, rows["count"].sum()))


def takes_fused(run: Run) -> bool:
    """Whether an optimizer of a trace may take `fused=True`; also where the trace names none."""
    names = run.head.config.get("optimizers")
    return not isinstance(names, list) or not names or any(name in FUSED_OPTIMIZERS for name in names)
