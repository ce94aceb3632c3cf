"""What the first sentence says of a trace of one call without a warm-up.

single_call_sentence(run)     # 'The trace holds a single call without a warm-up: 0.533 of 0.917 ms (58.1 %) are …'
"""

from amp_core.analysis.performance.kernels import numbers_of_import
from amp_core.findings.signals import facts
from amp_core.findings.step_sentences import passes_sentence
from amp_core.store.run import Run
from amp_core.text.formatting import join_words, number, percent

MIN_PART_FRAC = 0.05
"""Share of the first calls from which a kind of them is named."""


def single_call_sentence(run: Run) -> str:
    """That first calls take most of a trace in which nothing repeats; empty for others."""
    us, of_us, *parts_us = numbers_of_import(
        run, "single_call", "us", "of_us", "driver_us", "allocator_us", "operators_us"
    )
    if not 0 < us <= of_us or passes_sentence(run):
        return ""
    parts = zip(parts_us, ("the driver", "the allocator", "operators"), strict=True)
    kinds = join_words([kind for part_us, kind in parts if part_us >= MIN_PART_FRAC * us])
    is_single = facts(run.head.config, "single_call").get("is_single") is True
    return (
        f"The trace holds {'a single call' if is_single else 'few calls'} without a warm-up: {number(us / 1e3)} of "
        f"{number(of_us / 1e3, 'ms')} ({percent(us / of_us)}) are first calls of {kinds}; profile many calls after a "
        "warm-up."
    )
