"""What the first sentence says of a trace of one call without a warm-up.

single_call_sentence(run)     # 'The trace holds a single call without a warm-up: 0.533 of 0.917 ms (58.1 %) are …'
"""

from amp_core.analysis.performance.kernels import numbers_of_import, window_rows
from amp_core.findings.signals import facts
from amp_core.findings.step_sentences import passes_sentence
from amp_core.store.run import Run
from amp_core.text.formatting import join_words, number, percent

MAX_BUSY_FRAC = 0.5
"""Share of the window after the first calls in which the device works, from which the trace tells more than these."""
MIN_PART_FRAC = 0.05
"""Share of the first calls from which a kind of them is named."""


def single_call_sentence(run: Run) -> str:
    """That first calls take most of a trace in which nothing repeats, and the device is mostly idle after them; empty
    for others."""
    us, of_us, *parts_us = numbers_of_import(
        run, "single_call", "us", "of_us", "driver_us", "allocator_us", "operators_us"
    )
    if not 0 < us <= of_us or passes_sentence(run):
        return ""
    windows = window_rows(run)
    if float(windows["busy_us"].sum()) >= MAX_BUSY_FRAC * float(windows["wall_us"].sum()):  # whose work is judged
        return ""
    parts = zip(parts_us, ("the driver", "the allocator", "operators"), strict=True)
    kinds = join_words([kind for part_us, kind in parts if part_us >= MIN_PART_FRAC * us])
    is_single = facts(run.head.config, "single_call").get("is_single") is True
    ranks = windows["rank"]
    trace = f"Rank {ranks.min():.0f}'s trace" if ranks.nunique() > 1 else "The trace"  # that of the first one
    return (
        f"{trace} holds {'a single call' if is_single else 'few calls'} without a warm-up: {number(us / 1e3)} of "
        f"{number(of_us / 1e3, 'ms')} ({percent(us / of_us)}) are first calls of {kinds}; profile many calls after a "
        "warm-up."
    )
