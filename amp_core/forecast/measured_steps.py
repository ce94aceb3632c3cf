"""How far a forecast may be off: by the GPU, and by the share of the step whose operators no measurement covers.

>>> step_spread(trace.work, rates, "fp16", efficiency_of("NVIDIA A100-SXM4-80GB")).spread
0.28

The operators below take 1 % or more of the time of a published step (tests/benchmarks/published_steps.csv), so the
error of their kernels is known from whole steps. Of others, such as a recurrent layer, only the arithmetic is known. A
model made of them is unlike those that forecasts were compared with, so its range is wider.
"""

from dataclasses import dataclass

import pandas as pd

from amp_core.forecast.efficiency import Efficiency
from amp_core.forecast.roofline import Range, Work, operator_us
from amp_core.hardware.data_sheets import Rates

MEASURED_OPS = frozenset(
    [
        "_log_softmax",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_softmax",
        "_to_copy",
        "add",
        "addcdiv",
        "addcmul",
        "addmm",
        "amax",
        "bmm",
        "cat",
        "clone",
        "constant_pad_nd",
        "convolution",
        "copy",
        "div",
        "eq",
        "exp",
        "fill",
        "gelu",
        "hardtanh",
        "lerp",
        "masked_fill",
        "max_pool2d_with_indices",
        "mean",
        "mm",
        "mul",
        "native_batch_norm",
        "native_layer_norm",
        "neg",
        "nll_loss",
        "nll_loss_forward",
        "pow",
        "relu",
        "roll",
        "silu",
        "sqrt",
        "sub",
        "sum",
        "tanh",
        "threshold",
        "where",
        "zero",
    ]
)
"""Operators of published steps, fused attention by its names on a GPU too, without `_backward` and the `_` of operators
in place."""
UNCERTAIN_SPREAD = 0.5
"""Half of the range of what is not measured, as a share of the likely speed; and of two kinds of convolutions whose
kernels were measured to be far apart. The gradients of a depthwise one in FP32 take 1.9 to 8 times as long as the
forward's speed gives (`kernel_classes.DEPTHWISE_BACKWARD_FRAC`). One in groups depends on the library's kernel for
that width: in FP16 and channels last on RTX 3090, ResNeXt-50 is forecast 24 % too slow, RegNetX-3.2GF, whose groups
have 48 channels, 73 % too fast; without channels last it took 0.39 times that time (timm's other table)."""
MIN_UNMEASURED_FRAC = 0.1
"""Share of the time (0–1) in operators that are not measured from which on a forecast says so."""
_MAX_NAMES = 3


@dataclass(frozen=True)
class StepSpread:
    """The range of a step's forecast, and why."""

    spread: float
    """Half of the range, as a share of the likely speed."""
    unmeasured_frac: float
    """Share of the time (0–1) in operators that no published step has."""
    names: tuple[str, ...]
    """The operators that take most of it."""

    @property
    def note(self) -> str:
        """One sentence on a model unlike those measured; empty for others."""
        if self.unmeasured_frac < MIN_UNMEASURED_FRAC:
            return ""
        return (
            f"Not measured on such models: {100 * self.unmeasured_frac:.0f} % of the time is in operators that no "
            f"published step has ({', '.join(self.names)}), so the range is ± {100 * self.spread:.0f} %."
        )


def step_spread(work: pd.DataFrame, rates: Rates, recipe: str, of: Efficiency) -> StepSpread:
    """The spread of a step in a recipe: that of the GPU, and more for the share of its time in other operators."""
    us = operator_us(Work.of(work), rates, recipe, of.range().likely)
    share = us / us.sum() if us.sum() else us
    names = work["op"].astype(str).str.removesuffix("_data").str.removesuffix("_backward").str.rstrip("_")
    unmeasured = ~names.isin(MEASURED_OPS).to_numpy() & work["phase"].ne("optimizer").to_numpy()
    kind = work["kind"] if "kind" in work else pd.Series("", index=work.index)
    uncertain = unmeasured | (kind.eq("depthwise").to_numpy() & (recipe in ("fp32", "tf32")))
    if "batch" in work:
        uncertain |= work["batch"].gt(1).to_numpy() & work["op"].str.contains("conv").to_numpy()
    frac = float(share[unmeasured].sum())
    spread = of.spread + float(share[uncertain].sum()) * max(UNCERTAIN_SPREAD - of.spread, 0.0)
    most = pd.Series(share[unmeasured]).groupby(names.to_numpy()[unmeasured]).sum().sort_values(ascending=False)
    return StepSpread(spread, frac, tuple(most.index[:_MAX_NAMES]))


def step_range(work: pd.DataFrame, rates: Rates, recipe: str, of: Efficiency) -> Range:
    """The speeds of a step in a recipe: likely, slow and fast."""
    return of.range(step_spread(work, rates, recipe, of).spread)
