"""Pure functions from frames to plotly figures; they compute nothing.

    from amp_core.analysis import scale_trace, skip_episodes
    from amp_core.figures import scale_figure

    scale_figure(scale_trace(run), skip_episodes(run), dark=True)

Each figure names its subject in the title, has units on its axes and a text description in
`figure.layout.meta["alt"]`. An empty frame gives a figure that says so. Colours are only in `colours.py`.
"""

from amp_core.figures.baseline import with_baseline
from amp_core.figures.baseline_difference import difference_figure
from amp_core.figures.classes import class_bars
from amp_core.figures.colours import colour, recipe_colour, run_colours
from amp_core.figures.devices import device_figure
from amp_core.figures.exponent_change import exponent_change_figure
from amp_core.figures.forecast import forecast_figure
from amp_core.figures.formats import accumulation_figure, block_figure, format_range_figure
from amp_core.figures.kernels import kernel_figure, tensor_core_figure
from amp_core.figures.layer_errors import layer_error_figure
from amp_core.figures.layers import classes_over_time, exponents_over_time, magnitude_figure
from amp_core.figures.lines import grad_norm_figure, loss_figure, memory_figure
from amp_core.figures.loss_scale import scale_figure
from amp_core.figures.memory import memory_moments_figure, memory_parts_figure
from amp_core.figures.parity import agreement_figure, deviation_figure
from amp_core.figures.precision_map import precision_figure
from amp_core.figures.ranges import exponent_change_heatmap, exponent_heatmap
from amp_core.figures.ranks import rank_figure, rank_scale_figure
from amp_core.figures.step_cost import step_cost_figure
from amp_core.figures.step_time import compare_bars, phase_figure
from amp_core.figures.tensors_over_steps import step_heatmap
from amp_core.figures.timeline import timeline_figure
from amp_core.figures.underflow import underflow_figure

__all__ = [
    "accumulation_figure",
    "agreement_figure",
    "block_figure",
    "class_bars",
    "classes_over_time",
    "colour",
    "compare_bars",
    "deviation_figure",
    "device_figure",
    "difference_figure",
    "exponent_change_figure",
    "exponent_change_heatmap",
    "exponent_heatmap",
    "exponents_over_time",
    "forecast_figure",
    "format_range_figure",
    "grad_norm_figure",
    "kernel_figure",
    "layer_error_figure",
    "loss_figure",
    "magnitude_figure",
    "memory_figure",
    "memory_moments_figure",
    "memory_parts_figure",
    "phase_figure",
    "precision_figure",
    "rank_figure",
    "rank_scale_figure",
    "recipe_colour",
    "run_colours",
    "scale_figure",
    "step_cost_figure",
    "step_heatmap",
    "tensor_core_figure",
    "timeline_figure",
    "underflow_figure",
    "with_baseline",
]
