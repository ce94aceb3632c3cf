"""The safe window of loss scales: high enough that nothing that matters is lost, low enough that nothing overflows.

    >>> safe_window(run)
    SafeWindow(format='fp16', lowest=0.25, highest=131072.0, recommended=32768.0, ...)
    >>> safe_window_over_time(run)      # one row per sampled step: the band behind the trace of the loss scale

Upwards it ends where a largest magnitude reaches what rounds to infinity. Downwards it ends where rounding in the
subnormal range takes too much. A value below the smallest normal is rounded to a multiple of the smallest subnormal u,
which adds u²/12 to the square of the error on average (a rounding error spread evenly over one unit, as in Widrow and
Kollár, "Quantization Noise", 2008), and a value below u/2 is lost whole. The relative error of a tensor is

    ε(k)² = (Σ of the squares lost + n_subnormal · (u / 2^k)² / 12) / Σ of all squares

Errors of 16-bit output gradients travel on towards the first layer, so their squares are added over the model. For
weight gradients inside recurrent layers, and wherever no hook sees the 16-bit gradient that a weight gradient is made
from, that one's size follows from the weight gradient: a sum over N rows is √N times as large as its parts.

Only gradients that are rounded to 16 bits count, and downwards only those of matrices: a bias before a softmax or a
norm has a gradient of rounding errors alone, at every scale.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from amp_core.analysis.numerics.histograms import counted
from amp_core.analysis.numerics.ranges import sampled_steps
from amp_core.analysis.numerics.scale_limits import GRADIENTS, Limits, limits
from amp_core.analysis.numerics.what_if import format_named
from amp_core.formats import narrowest_first
from amp_core.schema import RunError
from amp_core.store.run import Run, check_run

COSINE = 0.999
"""Cosine between a gradient and its FP32 original from which on it counts as the same."""

ERROR_LIMIT = 0.0085
"""Relative error ε up to which a loss scale is safe. With an error at right angles to the gradient the cosine is
1 / √(1 + ε²), so `COSINE` allows 0.045; a factor of five, a little over two octaves of loss scale, is left for what
the estimate does not see. Held against audits of 16 models, scales inside the window then keep to `COSINE`, and four
octaves below it they do not."""

MARGIN_BITS = 2
"""How far below the highest safe scale the recommended one lies: gradients vary from step to step by a few times."""

GROWTH_INTERVAL = 2000
"""PyTorch's own. A scale that grows until it overflows costs one skipped step per interval: 0.05 % of all."""

FASTEST_GROWTH = 100
"""A shorter interval skips more than one step in a hundred once the scale is at the top."""

SERVED = 0.75
"""Share of the sampled steps whose need for a high scale is met. An overflow costs a step, so none is risked; that a
quarter of the steps loses a little more than `ERROR_LIMIT` is within the room which that leaves, and the worst of many
steps would narrow the window for all."""

MIN_STEPS = 4
"""Sampled steps from which on a trend of the window is looked for."""

UNHEALTHY = 0.05
"""Share of the values of a 16-bit recording that lie in the format's two lowest octaves, from which on as much again
must be taken to have been lost below them."""


@dataclass(frozen=True)
class SafeWindow:
    """The loss scales that serve every gradient of a run."""

    format: str
    lowest: float
    """Below it, rounding in the subnormal range takes more than `ERROR_LIMIT` from at least one gradient, at more than
    a quarter of the steps."""
    highest: float
    """Above it, at least one gradient overflows at one of the steps."""
    recommended: float
    """For the start: a power of two, `MARGIN_BITS` below the highest where the window is wide enough; 1 where the
    format needs no loss scale."""
    growth_interval: int
    """Recommended for `torch.amp.GradScaler`."""
    lowest_by: str
    """The tensor that needs the scale to be at least `lowest`."""
    highest_by: str
    """The tensor that needs it to be at most `highest`."""
    why: str
    """The reasons for `recommended` and `growth_interval`, in words."""
    first_step: int
    """First and last of the sampled steps that the window is of."""
    last_step: int
    caveat: str | None
    """What makes the prediction doubtful; None where nothing does."""

    @property
    def exists(self) -> bool:
        """Whether one scale serves all tensors; if not, another format or FP32 islands must."""
        return self.lowest <= self.highest


def safe_window(run: Run, format: str = "fp16", step: int | None = None) -> SafeWindow:  # noqa: A002
    """The loss scales that serve every gradient of the run, for `format` under autocast.

    With `step`, at the sampled step nearest at or before it. Otherwise at all sampled steps of the second half of the
    run alike: in the first steps of a training gradients are unlike all later ones, and a dynamic scale skips past
    them. Where the run was audited, at all sampled steps from the first audit on, which the window can be held against.
    Raises `RunError` for an unknown format and for a run without gradients.
    """
    check_run(run)
    form = format_named(format)
    found = limits(run, form, ERROR_LIMIT, step, since=first_step(run) if step is None else None)
    if not len(found.steps):
        raise RunError(f"run={run.name!r} has no recorded gradients; record weight_grad and output_grad to predict")
    needed = np.argsort(found.lowest, kind="stable")
    low, high = int(needed[int(np.ceil(SERVED * (len(needed) - 1)))]), int(found.highest.argmin())
    lowest, highest = float(found.lowest[low]), float(found.highest[high])
    needs_none = form.has_fp32_range and lowest <= 0 <= highest
    recommended = 0.0 if needs_none else min(max(highest - MARGIN_BITS, lowest), highest)
    rise = _rise(found)
    interval = int(np.clip(1 / (2 * rise), FASTEST_GROWTH, GROWTH_INTERVAL)) if rise > 0 else GROWTH_INTERVAL
    return SafeWindow(
        format=format,
        lowest=2.0**lowest,
        highest=2.0**highest,
        recommended=2.0**recommended,
        growth_interval=interval,
        lowest_by=found.lowest_by[low],
        highest_by=found.highest_by[high],
        why="The format has the range of FP32 and needs no loss scale."
        if needs_none
        else _scale_in_words(lowest, highest, recommended) + _interval_in_words(interval, rise),
        first_step=int(found.steps[0]),
        last_step=int(found.steps[-1]),
        caveat=_caveat(run),
    )


def safe_window_over_time(run: Run, format: str = "fp16") -> pd.DataFrame:  # noqa: A002
    """The window at each sampled step: step, lowest, highest (loss scales), lowest_by, highest_by (tensors).

    Empty without gradients. Raises `RunError` for an unknown format.
    """
    found = limits(run, format_named(format), ERROR_LIMIT)
    return pd.DataFrame(
        {
            "step": found.steps,
            "lowest": np.exp2(found.lowest),
            "highest": np.exp2(found.highest),
            "lowest_by": pd.Series(found.lowest_by, dtype="str"),
            "highest_by": pd.Series(found.highest_by, dtype="str"),
        }
    )


def first_step(run: Run) -> int | None:
    """From which sampled step on `safe_window` looks at a run; None where nothing was sampled."""
    steps = np.array(sorted({s for kind in GRADIENTS for s in sampled_steps(run, kind)}), dtype=np.int64)
    if not len(steps):
        return None
    audited = pc.min(run.table("audits").column("step")).as_py()
    if audited is None:
        return int(steps[len(steps) // 2])
    return int(steps[max(np.searchsorted(steps, audited, side="right") - 1, 0)])


def _rise(found: Limits) -> float:
    """By how many octaves per step the window moves up; 0 where it does not clearly."""
    middle = (found.lowest + found.highest) / 2
    if len(middle) < MIN_STEPS:
        return 0.0
    rise = float(np.polyfit(found.steps - found.steps[0], middle, 1)[0])
    clear = rise * float(found.steps[-1] - found.steps[0]) >= MARGIN_BITS
    return rise if clear else 0.0


def _scale_in_words(lowest: float, highest: float, recommended: float) -> str:
    if lowest > highest:
        return (
            f"No scale serves all: one gradient needs at least 2^{lowest:.0f}, another at most 2^{highest:.0f}; "
            f"2^{recommended:.0f} overflows nowhere."
        )
    above, below = recommended - lowest, highest - recommended
    return (
        f"2^{recommended:.0f} lies {below:.0f} octaves below the first overflow and {above:.0f} above the first loss."
    )


def _interval_in_words(interval: int, rise: float) -> str:
    if interval < GROWTH_INTERVAL:
        return (
            f" The window rises by an octave in {1 / rise:.0f} steps; growing every {interval} clean steps keeps up, "
            f"and at the top skips at most one step in {interval}."
        )
    return f" Growing every {interval} clean steps skips at most {100 / interval:.2f} % of all steps once at the top."


def _caveat(run: Run) -> str | None:
    """What the recording lacks of what the prediction would need, or had itself lost."""
    table = run.table("tensors")
    if not pc.any(pc.equal(table.column("kind"), "output_grad")).as_py():
        return "no output gradients were recorded, so the lowest scale is a guess from the weight gradients alone"
    for form in (f for f in narrowest_first()[::-1] if f.dtype is not None and not f.has_fp32_range):
        chosen = pc.and_(
            pc.is_in(table.column("kind"), pa.array(GRADIENTS)), pc.equal(table.column("dtype"), form.dtype)
        )
        found = counted(table.filter(chosen), as_stored=True)
        values = found.counts.sum(axis=1)
        if not values.any():
            continue
        lowest = found.counts[:, found.exponents <= form.min_subnormal_exponent + 1].sum(axis=1)
        share = lowest / np.maximum(values, 1)
        worst = int(share.argmax())
        if share[worst] > UNHEALTHY:
            return (
                f"{100 * share[worst]:.0f} % of what was recorded of {found.names[worst]} lies at the bottom of "
                f"{form.label}: "
                "as much again was lost before it could be counted, so predict from a run with a higher loss scale, in "
                "BF16 or in FP32"
            )
    return None
