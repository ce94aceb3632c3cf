"""The safe window of loss scales: high enough that no significant part underflows, low enough that nothing overflows.

    >>> safe_window(run)
    SafeWindow(format='fp16', lowest=0.25, highest=131072.0, recommended=32768.0, ...)
    >>> safe_window_over_time(run)      # one row per sampled step: the band behind the trace of the loss scale

The upper end is where a largest magnitude rounds to infinity. The lower end is where rounding in the subnormal range
costs too much. A value below the smallest normal is rounded to a multiple of the smallest subnormal u, which adds u²/12
to the mean square error (a rounding error uniform over one unit, as in Widrow and Kollár, "Quantization Noise", 2008),
and a value below u/2 becomes 0. The relative error of a tensor is

    ε(k)² = (Σ of the squares lost + n_subnormal · (u / 2^k)² / 12) / Σ of all squares

Errors of 16-bit output gradients propagate to the first layer, so their squares are summed over the model. For weight
gradients in recurrent layers, and wherever no hook sees the 16-bit gradient that a weight gradient is computed from,
its size follows from the weight gradient: a sum over N rows is √N times as large as its terms.

Observations bound both ends: no scale is safe at which the run skipped a step in backward, or at which its gradients
underflowed.

Only gradients that are rounded to 16 bits count, and for the lower end only those of matrices: the gradient of a bias
before a softmax or a norm consists of rounding errors only, at every scale.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import pyarrow.compute as pc

from amp_core.analysis.numerics.histograms import count_values
from amp_core.analysis.numerics.ranges import sampled_steps
from amp_core.analysis.numerics.scale_limits import Limits, limits
from amp_core.analysis.numerics.what_if import GRADIENTS, find_format
from amp_core.analysis.steps import autocast_dtype
from amp_core.formats import Format, narrowest_first
from amp_core.schema import RunError
from amp_core.store.run import Run, check_run
from amp_core.text.formatting import raised

MIN_COSINE = 0.999
"""Cosine between a gradient and its FP32 replay from which the two count as equal."""

MAX_ERROR = 0.0085
"""Relative error ε up to which a loss scale is safe. With an error orthogonal to the gradient the cosine is
1 / √(1 + ε²), so `MIN_COSINE` allows 0.045; a factor of five, a little over two octaves of loss scale, is a margin for
effects outside the estimate. In audits of 16 models, scales inside the window reach `MIN_COSINE`, and four
octaves below it they do not."""

MARGIN_BITS = 2
"""Octaves between the highest safe scale and the recommended one: gradients vary between steps by a small factor."""

INIT_SCALE = 2.0**16
"""PyTorch's default."""

GROWTH_INTERVAL = 2000
"""PyTorch's default. A scale that grows until it overflows costs one skipped step per interval: 0.05 % of all."""

MIN_GROWTH_INTERVAL = 100
"""A shorter interval skips more than one step in a hundred once the scale has reached its maximum."""

SERVED_STEPS_FRAC = 0.75
"""Share of the sampled steps whose lower bound the window meets. An overflow costs a step, so none is risked; that a
quarter of the steps loses a little more than `MAX_ERROR` is within its margin, and the worst of many
steps would narrow the window for all."""

MIN_TREND_STEPS = 4
"""Fewest sampled steps for a trend of the window."""

MAX_BOTTOM_FRAC = 0.05
"""Share of the values of a 16-bit recording in the format's two lowest octaves above which about as many values
must have underflowed."""


@dataclass(frozen=True)
class SafeWindow:
    """The loss scales that suit every gradient of a run."""

    format: str
    lowest: float
    """Below it, rounding in the subnormal range costs at least one gradient more than `MAX_ERROR`, at more than
    a quarter of the steps."""
    highest: float
    """Above it, at least one gradient overflows at one of the steps."""
    recommended: float
    """Initial scale: a power of two, `MARGIN_BITS` below the highest if the window is wide enough; 1 if the
    format needs no loss scale."""
    growth_interval: int
    """Recommended for `torch.amp.GradScaler`."""
    lowest_by: str
    """The tensor that requires at least `lowest`."""
    highest_by: str
    """The tensor that requires at most `highest`."""
    why: str
    """The reasons for `recommended` and `growth_interval`, in words."""
    first_step: int
    """First and last of the sampled steps of the window."""
    last_step: int
    caveat: str | None
    """Why the prediction is doubtful; None if it is not."""
    underflowed_at: float | None = None
    """A loss scale of the run at which its 16-bit gradients underflowed, first in `lowest_by`; None if they did not."""

    @property
    def exists(self) -> bool:
        """Whether one scale suits all tensors; if not, use another format or FP32 islands."""
        return self.lowest <= self.highest


def safe_window(run: Run, format: str = "fp16", step: int | None = None) -> SafeWindow:  # noqa: A002
    """The loss scales that suit every gradient of the run, for `format` under autocast.

    With `step`, at the last sampled step at or before it. Otherwise at all sampled steps of the second half of the
    run: in the first steps of a training gradients differ from all later ones, and a dynamic scale adapts by skipping
    them. In an audited run, at all sampled steps from the first audit on, so that window and audits are comparable.
    Raises `RunError` for an unknown format and for a run without gradients.
    """
    check_run(run)
    form = find_format(format)
    window_limits = limits(run, form, MAX_ERROR, step, since=first_step(run) if step is None else None)
    if not len(window_limits.steps):
        raise RunError(f"run={run.name!r} has no recorded gradients; a prediction needs weight_grad and output_grad")
    needed = np.argsort(window_limits.lowest, kind="stable")
    low, high = int(needed[int(np.ceil(SERVED_STEPS_FRAC * (len(needed) - 1)))]), int(window_limits.highest.argmin())
    lowest, highest = float(window_limits.lowest[low]), float(window_limits.highest[high])
    lowest_by, underflow = window_limits.lowest_by[low], _underflow(run)
    if underflow is not None and autocast_dtype(run) == form.dtype:
        above = float(np.floor(np.log2(underflow.scale))) + 1
        lowest, lowest_by = max(lowest, above), underflow.name
    needs_none = form.has_fp32_range and lowest <= 0 <= highest
    recommended = 0.0 if needs_none else min(max(highest - MARGIN_BITS, lowest), highest)
    rise = _rise(window_limits)
    interval = int(np.clip(1 / (2 * rise), MIN_GROWTH_INTERVAL, GROWTH_INTERVAL)) if rise > 0 else GROWTH_INTERVAL
    return SafeWindow(
        format=format,
        lowest=2.0**lowest,
        highest=2.0**highest,
        recommended=2.0**recommended,
        growth_interval=interval,
        lowest_by=lowest_by,
        highest_by=window_limits.highest_by[high],
        why="The format has the range of FP32 and needs no loss scale."
        if needs_none
        else raised(_scale_in_words(lowest, highest, recommended)) + _interval_in_words(interval, rise),
        first_step=int(window_limits.steps[0]),
        last_step=int(window_limits.steps[-1]),
        caveat=_caveat(run, underflow),
        underflowed_at=underflow.scale if underflow else None,
    )


def safe_window_over_time(run: Run, format: str = "fp16") -> pd.DataFrame:  # noqa: A002
    """The window at each sampled step: step, lowest, highest (loss scales), lowest_by, highest_by (tensors).

    Empty without gradients. Raises `RunError` for an unknown format.
    """
    window_limits = limits(run, find_format(format), MAX_ERROR)
    return pd.DataFrame(
        {
            "step": window_limits.steps,
            "lowest": np.exp2(window_limits.lowest),
            "highest": np.exp2(window_limits.highest),
            "lowest_by": pd.Series(window_limits.lowest_by, dtype="str"),
            "highest_by": pd.Series(window_limits.highest_by, dtype="str"),
        }
    )


def first_step(run: Run) -> int | None:
    """The first sampled step of `safe_window`; None if nothing was sampled."""
    steps = np.array(sorted({s for kind in GRADIENTS for s in sampled_steps(run, kind)}), dtype=np.int64)
    if not len(steps):
        return None
    audited = pc.min(run.table("audits").column("step")).as_py()
    if audited is None:
        return int(steps[len(steps) // 2])
    return int(steps[max(np.searchsorted(steps, audited, side="right") - 1, 0)])


def _rise(window_limits: Limits) -> float:
    """Octaves per step by which the window rises; 0 if there is no clear trend."""
    middle = (window_limits.lowest + window_limits.highest) / 2
    if len(middle) < MIN_TREND_STEPS:
        return 0.0
    rise = float(np.polyfit(window_limits.steps - window_limits.steps[0], middle, 1)[0])
    clear = rise * float(window_limits.steps[-1] - window_limits.steps[0]) >= MARGIN_BITS
    return rise if clear else 0.0


def _scale_in_words(lowest: float, highest: float, recommended: float) -> str:
    if lowest > highest:
        return (
            f"No loss scale suits all gradients: one needs at least 2^{lowest:.0f}, another at most 2^{highest:.0f}; "
            f"2^{recommended:.0f} overflows nowhere."
        )
    above, below = recommended - lowest, highest - recommended
    return (
        f"2^{recommended:.0f} is {below:.0f} octaves below the first overflow and {above:.0f} above the first "
        "underflow."
    )


def _interval_in_words(interval: int, rise: float) -> str:
    if interval < GROWTH_INTERVAL:
        return (
            f" The window rises by one octave every {1 / rise:.0f} steps; a growth interval of {interval} keeps up, "
            f"and once at the upper bound skips at most one step in {interval}."
        )
    return f" A growth interval of {interval} skips at most {100 / interval:.2f} % of steps once at the upper bound."


def _caveat(run: Run, underflow: "_Underflow | None") -> str | None:
    """What the recording lacks for the prediction, or what had already underflowed in it."""
    if not pc.any(pc.equal(run.table("tensors").column("kind"), "output_grad")).as_py():
        return "no output gradients were recorded, so the lower bound is estimated from the weight gradients alone"
    if underflow is None:
        return None
    return (
        f"{100 * underflow.frac:.0f} % of the recorded values of {underflow.name} lie at the smallest magnitudes of "
        f"{underflow.format.label}, so about as many had already underflowed before they were counted; predict from a "
        "run with a higher loss scale, in BF16 or in FP32"
    )


@dataclass(frozen=True)
class _Underflow:
    """A 16-bit gradient that underflowed as it was recorded."""

    name: str
    frac: float
    """Share of its values in the two lowest octaves of `format`."""
    format: Format
    scale: float
    """The lowest loss scale at which it was recorded."""


def _underflow(run: Run) -> _Underflow | None:
    """The first gradient in backward with more than `MAX_BOTTOM_FRAC` of its values in the format's lowest octaves."""
    table = run.table("tensors")
    for form in (f for f in narrowest_first()[::-1] if f.dtype is not None and not f.has_fp32_range):
        for kind in reversed(GRADIENTS):  # output gradients are in the order of backward
            chosen = pc.and_(pc.equal(table.column("kind"), kind), pc.equal(table.column("dtype"), form.dtype))
            rows = table.filter(chosen)
            histograms = count_values(rows, as_stored=True)
            values = histograms.counts.sum(axis=1)
            lowest = histograms.counts[:, histograms.exponents <= form.min_subnormal_exponent + 1].sum(axis=1)
            share = lowest / np.maximum(values, 1)
            if not (share > MAX_BOTTOM_FRAC).any():
                continue
            first = int((share > MAX_BOTTOM_FRAC).argmax())
            name = histograms.names[first]
            scale = pc.min(rows.filter(pc.equal(rows.column("name"), name)).column("loss_scale")).as_py()
            return _Underflow(name, float(share[first]), form, scale if scale and scale > 0 else 1.0)
    return None
