"""From a run to frames and small frozen dataclasses: pure functions that draw, print and read nothing.

from amp_core.analysis import exponent_shares, scale_trace

scale_trace(run)                            # one row per step attempted
exponent_shares(run, "output_grad")         # one row per tensor and exponent
"""

from amp_core.analysis.compare import Comparison, compare
from amp_core.analysis.curves import labelled, loss_curves
from amp_core.analysis.memory import MemorySummary, memory_summary, memory_trace, what_memory
from amp_core.analysis.overview import Overview, overview
from amp_core.analysis.ranges import class_shares, exponent_shares, kinds_present, sampled_steps
from amp_core.analysis.scale import ScaleSummary, scale_summary, scale_trace, skip_episodes
from amp_core.analysis.speed import PHASES, SpeedSummary, phase_times, speed_summary
from amp_core.analysis.thin import sparkline, thin

__all__ = [
    "PHASES",
    "Comparison",
    "MemorySummary",
    "Overview",
    "ScaleSummary",
    "SpeedSummary",
    "class_shares",
    "compare",
    "exponent_shares",
    "kinds_present",
    "labelled",
    "loss_curves",
    "memory_summary",
    "memory_trace",
    "overview",
    "phase_times",
    "sampled_steps",
    "scale_summary",
    "scale_trace",
    "skip_episodes",
    "sparkline",
    "speed_summary",
    "thin",
    "what_memory",
]
