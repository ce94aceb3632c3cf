"""Memory that a step needs, and the largest batch that fits on a part.

>>> memory_needed(trace)                # bytes, low and high
(5.1e9, 6.9e9)
>>> largest_batch(trace, rates)         # samples, low and high
(28, 41)
"""

from amp_core.forecast.traced_work import StepTrace
from amp_core.hardware.data_sheets import Rates

USABLE_FRAC = 0.95
"""Fraction of a part's memory that a process can use: drivers and ECC take the rest."""
CONTEXT_BYTES = (0.4e9, 1.2e9)
"""CUDA's context, libraries and their workspaces, low and high."""
ALLOCATOR_RATIOS = (1.0, 1.25)
"""Memory that the allocator holds over what tensors need (temporaries, fragments), low and high."""


def memory_needed(trace: StepTrace, samples: float | None = None) -> tuple[float, float] | None:
    """Peak bytes of a step of `samples` (by default as traced), low and high; None if not known.

    Low: gradients are allocated as activations are freed. High: all of both at once, and fragmentation. Where the
    trace has the peak of the tensors themselves, that takes their place for the traced batch.
    """
    if samples is None and trace.memory.peak is not None:
        ends = zip(CONTEXT_BYTES, ALLOCATOR_RATIOS, strict=True)
        low, high = (context + ratio * trace.memory.peak for context, ratio in ends)
        return low, high
    per_sample = _per_sample(trace)
    memory = trace.memory
    if per_sample is None or trace.samples is None or memory.parameters is None:
        return None
    activations = per_sample * (trace.samples if samples is None else samples)
    gradients = memory.gradients if memory.gradients else memory.parameters
    held = memory.parameters + (memory.optimizer or 0.0) + memory.weight_copies
    low = CONTEXT_BYTES[0] + ALLOCATOR_RATIOS[0] * (held + max(activations, gradients))
    return low, CONTEXT_BYTES[1] + ALLOCATOR_RATIOS[1] * (held + activations + gradients)


def largest_batch(trace: StepTrace, rates: Rates) -> tuple[int, int] | None:
    """Samples of one step that fit, low and high; 0 if not even one is sure to fit. None if not known."""
    per_sample = _per_sample(trace)
    one, none = memory_needed(trace, 1.0), memory_needed(trace, 0.0)
    if not per_sample or one is None or none is None:
        return None
    available = USABLE_FRAC * rates.memory_gb * 1e9
    surely = int((available - none[1]) / (ALLOCATOR_RATIOS[1] * per_sample))
    held = none[0] - max(0.0, trace.memory.gradients or trace.memory.parameters or 0.0)
    perhaps = int((available - held) / (ALLOCATOR_RATIOS[0] * per_sample)) if none[0] < available else 0
    return max(0, surely), max(0, perhaps)


def _per_sample(trace: StepTrace) -> float | None:
    if trace.memory.activations is None or not trace.samples:
        return None
    return trace.memory.activations / trace.samples
