"""Memory that a step needs, and the largest batch that fits on a part.

>>> memory_needed(trace)                # bytes, low and high
(5.1e9, 6.9e9)
>>> largest_batch(trace, rates)         # samples, low and high
(28, 41)
"""

from bisect import bisect_right

from amp_core.forecast.traced_work import StepTrace
from amp_core.hardware.data_sheets import Rates

USABLE_FRAC = 0.95
"""Fraction of a part's memory that a process can use: drivers and ECC take the rest."""
CONTEXT_BYTES = (0.4e9, 1.2e9)
"""CUDA's context, libraries and their workspaces, low and high."""
ALLOCATOR_RATIOS = (1.0, 1.25)
"""Memory that the allocator holds over what tensors need (temporaries, fragments), low and high."""
MAX_SAMPLES = 1 << 30
"""Larger batches are not looked for."""


def memory_needed(trace: StepTrace, samples: float | None = None) -> tuple[float, float] | None:
    """Peak bytes of a step of `samples` (by default as traced), low and high; None if not known.

    From the peak of the tensors where the trace has it. Otherwise low: gradients are allocated as activations are
    freed; high: all of both at once. High includes fragmentation.
    """
    memory = trace.memory
    samples = trace.samples if samples is None else samples
    if memory.peak is not None and samples == trace.samples:
        tensors = memory.peak, memory.peak
    elif samples is None or not trace.samples or memory.activations is None or memory.parameters is None:
        return None
    else:
        held = memory.parameters + (memory.optimizer or 0.0) + memory.weight_copies
        per_sample = memory.activations / trace.samples
        if memory.peak is not None:
            slope = per_sample if memory.peak_per_sample is None else memory.peak_per_sample
            peak = max(held, memory.peak + slope * (samples - trace.samples))
            tensors = peak, peak
        else:
            activations, gradients = per_sample * samples, memory.gradients or memory.parameters
            tensors = held + max(activations, gradients), held + activations + gradients
    low, high = (c + r * t for c, r, t in zip(CONTEXT_BYTES, ALLOCATOR_RATIOS, tensors, strict=True))
    return low, high


def largest_batch(trace: StepTrace, rates: Rates) -> tuple[int, int] | None:
    """Samples of one step that fit, low and high; 0 if not even one is sure to fit. None if not known.

    By `memory_needed`: its high end fits surely, its low end perhaps.
    """
    if not trace.memory.activations or memory_needed(trace, 1.0) is None:
        return None
    available = USABLE_FRAC * rates.memory_gb * 1e9

    def most(end: int) -> int:
        def needed(samples: int) -> float:
            both = memory_needed(trace, samples)
            assert both is not None
            return both[end]

        return max(0, bisect_right(range(MAX_SAMPLES), available, key=needed) - 1)

    return most(1), most(0)
