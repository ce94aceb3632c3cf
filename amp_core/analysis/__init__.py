"""Pure functions from a run to frames and small frozen dataclasses; they neither draw, print nor read files.

from amp_core.analysis import exponent_shares, scale_trace

scale_trace(run)                            # one row per step attempted
exponent_shares(run, "output_grad")         # one row per tensor and exponent
"""

from amp_core.analysis.baseline import baseline_index, lost_gradient, step_marks
from amp_core.analysis.comparison.baseline_change import baseline_band, baseline_changes, layer_band
from amp_core.analysis.comparison.compare import Comparison, compare
from amp_core.analysis.comparison.divergence import FirstDifference, first_difference, forward_differences
from amp_core.analysis.comparison.exponent_change import changed_tensors, exponent_changes
from amp_core.analysis.comparison.loss_curves import loss_curves, loss_difference
from amp_core.analysis.comparison.mean_change import update_changes
from amp_core.analysis.comparison.noise_band import first_runs, gradient_agreement, noise_band
from amp_core.analysis.comparison.step_cost_change import compare_step_cost
from amp_core.analysis.downsample import downsample, sparkline
from amp_core.analysis.numerics.audits import predicted_and_audited
from amp_core.analysis.numerics.layer_advice import layer_advice
from amp_core.analysis.numerics.loss_scale import ScaleSummary, scale_summary, scale_trace, skip_episodes
from amp_core.analysis.numerics.ranges import class_shares, exponent_shares, kinds_present, sampled_steps
from amp_core.analysis.numerics.safe_window import SafeWindow, safe_window, safe_window_over_time
from amp_core.analysis.numerics.tensors_over_steps import shares_over_steps
from amp_core.analysis.numerics.update_losses import (
    average_losses,
    update_losses,
    update_losses_over_steps,
    update_summary,
)
from amp_core.analysis.numerics.what_if import what_if, whole_model
from amp_core.analysis.overview import Overview, overview
from amp_core.analysis.performance.amdahl import Amdahl, amdahl
from amp_core.analysis.performance.devices import DeviceNow, device_now, device_samples, not_recorded_reasons
from amp_core.analysis.performance.eligible_ops import matrix_ops, missed_tensor_core_time
from amp_core.analysis.performance.energy import Energy, energy_per_sample
from amp_core.analysis.performance.memory import MemorySummary, memory_description, memory_summary, memory_trace
from amp_core.analysis.performance.memory_breakdown import (
    MemoryBreakdown,
    memory_breakdown,
    memory_difference,
    memory_modules,
    memory_moments,
    memory_parts,
    memory_phases,
    memory_steps,
)
from amp_core.analysis.performance.precision_map import PrecisionMap, precision_cells, precision_map
from amp_core.analysis.performance.precision_settings import (
    format_labels,
    precision_disagreements,
    precision_settings,
)
from amp_core.analysis.performance.step_cost import StepCost, phase_cost, step_cost
from amp_core.analysis.performance.step_time import PHASES, SpeedSummary, phase_times, speed_summary
from amp_core.analysis.performance.tensor_cores import (
    TensorCoreUse,
    kernel_table,
    profiled_windows,
    tensor_core_shares,
    tensor_core_use,
)
from amp_core.analysis.performance.timeline import timeline, timeline_bars
from amp_core.analysis.performance.traced_ops import traced_steps
from amp_core.analysis.ranks import rank_ends, rank_scales, rank_table
from amp_core.analysis.run_labels import unique_labels
from amp_core.analysis.steps import slow_first_step
from amp_core.hardware.kernel_names import KernelClass, classify_kernel

__all__ = [
    "PHASES",
    "Amdahl",
    "Comparison",
    "DeviceNow",
    "Energy",
    "FirstDifference",
    "KernelClass",
    "MemoryBreakdown",
    "MemorySummary",
    "Overview",
    "PrecisionMap",
    "SafeWindow",
    "ScaleSummary",
    "SpeedSummary",
    "StepCost",
    "TensorCoreUse",
    "amdahl",
    "average_losses",
    "baseline_band",
    "baseline_changes",
    "baseline_index",
    "changed_tensors",
    "class_shares",
    "classify_kernel",
    "compare",
    "compare_step_cost",
    "device_now",
    "device_samples",
    "downsample",
    "energy_per_sample",
    "exponent_changes",
    "exponent_shares",
    "first_difference",
    "first_runs",
    "format_labels",
    "forward_differences",
    "gradient_agreement",
    "kernel_table",
    "kinds_present",
    "layer_advice",
    "layer_band",
    "loss_curves",
    "loss_difference",
    "lost_gradient",
    "matrix_ops",
    "memory_breakdown",
    "memory_description",
    "memory_difference",
    "memory_modules",
    "memory_moments",
    "memory_parts",
    "memory_phases",
    "memory_steps",
    "memory_summary",
    "memory_trace",
    "missed_tensor_core_time",
    "noise_band",
    "not_recorded_reasons",
    "overview",
    "phase_cost",
    "phase_times",
    "precision_cells",
    "precision_disagreements",
    "precision_map",
    "precision_settings",
    "predicted_and_audited",
    "profiled_windows",
    "rank_ends",
    "rank_scales",
    "rank_table",
    "safe_window",
    "safe_window_over_time",
    "sampled_steps",
    "scale_summary",
    "scale_trace",
    "shares_over_steps",
    "skip_episodes",
    "slow_first_step",
    "sparkline",
    "speed_summary",
    "step_cost",
    "step_marks",
    "tensor_core_shares",
    "tensor_core_use",
    "timeline",
    "timeline_bars",
    "traced_steps",
    "unique_labels",
    "update_changes",
    "update_losses",
    "update_losses_over_steps",
    "update_summary",
    "what_if",
    "whole_model",
]
