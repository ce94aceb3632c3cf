"""The catalogue of views: each chart composed once, for the pages, the live page, notebooks and reports.

    LOSS_SCALE.draw(run, dark=True)                       # a notebook
    LOSS_SCALE.draw(run, charts.dark(), loaders.analysed) # a page: each analysis is cached
    frame = RANGES.frame(run, kind="weight_grad")         # the data of the chart, as plain tables
    RANGES.missing(run)                                   # None, or a sentence that says why there is no chart

A view calls analyses and passes their results to a figure; it computes nothing itself. Modules of views import figures
only inside functions that draw, so that names, frames and `missing` need no plotly.
"""

from typing import Any

from amp_core.views._view import Ask, View, uncached
from amp_core.views.profiled import (
    KERNELS,
    MEMORY_MOMENTS,
    MEMORY_PARTS,
    PRECISION_MAP,
    STEP_COST,
    TENSOR_CORES,
    TIMELINE,
)
from amp_core.views.ranks import RANK_SCALES, RANKS
from amp_core.views.several import AGREEMENT, LOSSES, MEMORY_COMPARISON, STEP_COSTS
from amp_core.views.steps import DEVICE, GRAD_NORM, LOSS, LOSS_SCALE, MEMORY, PHASES
from amp_core.views.tensors import CLASSES, RANGES, UPDATES

RUN_VIEWS: dict[str, View[Any]] = {
    view.name: view
    for view in (
        LOSS,
        LOSS_SCALE,
        GRAD_NORM,
        RANGES,
        CLASSES,
        UPDATES,
        PHASES,
        STEP_COST,
        TIMELINE,
        MEMORY_PARTS,
        MEMORY_MOMENTS,
        MEMORY,
        DEVICE,
        TENSOR_CORES,
        KERNELS,
        PRECISION_MAP,
        RANKS,
        RANK_SCALES,
    )
}
"""Views of one run, by name, in the order in which a report shows them."""

MULTI_RUN_VIEWS: dict[str, View[Any]] = {view.name: view for view in (LOSSES, STEP_COSTS, MEMORY_COMPARISON, AGREEMENT)}
"""Views of several runs, by name."""

__all__ = [
    "AGREEMENT",
    "CLASSES",
    "DEVICE",
    "GRAD_NORM",
    "KERNELS",
    "LOSS",
    "LOSSES",
    "LOSS_SCALE",
    "MEMORY",
    "MEMORY_COMPARISON",
    "MEMORY_MOMENTS",
    "MEMORY_PARTS",
    "MULTI_RUN_VIEWS",
    "PHASES",
    "PRECISION_MAP",
    "RANGES",
    "RANKS",
    "RANK_SCALES",
    "RUN_VIEWS",
    "STEP_COST",
    "STEP_COSTS",
    "TENSOR_CORES",
    "TIMELINE",
    "UPDATES",
    "Ask",
    "View",
    "uncached",
]
