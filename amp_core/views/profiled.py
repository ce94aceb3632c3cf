"""Views of profiled and traced steps: parts of their memory and time, kernels, operators by precision."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from amp_core.analysis import (
    kernel_table,
    memory_breakdown,
    memory_moments,
    memory_parts,
    memory_steps,
    precision_cells,
    precision_map,
    step_cost,
    tensor_core_shares,
    tensor_core_use,
    timeline,
    timeline_bars,
)
from amp_core.hardware.gpus import core_names
from amp_core.store.run import Run
from amp_core.views._view import Ask, View, figures

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Titled:
    """A table, and the title of its chart."""

    table: pd.DataFrame
    title: str


def _memory_parts(run: Run, ask: Ask, step: int | None = None) -> Titled:
    breakdown = ask(memory_breakdown, run, step) if step is not None else ask(memory_breakdown, run)
    title = "Peak tensor memory" if breakdown.on_cpu else "Memory at the peak"
    return Titled(memory_parts([breakdown], [run.name]), title)


def _no_memory_parts(frame: Titled) -> str | None:
    known = (frame.table["bytes"] > 0).any()
    return None if known else "No step's memory was recorded in this run."


@dataclass(frozen=True)
class Moments:
    """The memory of one step over time."""

    table: pd.DataFrame
    """From `memory_moments`."""
    title: str
    tensors_only: bool
    """True on a CPU, where most memory of the process belongs to no tensor."""


def _memory_moments(run: Run, ask: Ask, step: int | None = None) -> Moments:
    steps = ask(memory_steps, run)
    step = step if step is not None or not steps else steps[-1]
    table = ask(memory_moments, run, step)
    title = f"Memory through step {step:,}" if step is not None else "Memory through a step"
    if run.steps.empty:
        title = "Memory through the profiled window"
    return Moments(table, title, ask(memory_breakdown, run, step).on_cpu)


@dataclass(frozen=True)
class CoreShares:
    """Shares of kernel time from `tensor_core_shares`, and what the GPU's vendor calls its cores."""

    table: pd.DataFrame
    cores: tuple[str, str]


def _tensor_cores(run: Run, ask: Ask, step: int | None = None) -> CoreShares:
    names = core_names(ask(tensor_core_use, run, step).device_name)
    return CoreShares(ask(tensor_core_shares, run, step), names)


def _kernels(run: Run, ask: Ask, step: int | None = None) -> Titled:
    on_cpu = ask(tensor_core_use, run, step).on_cpu
    table = ask(kernel_table, run, "kernel", step)
    return Titled(table, "Where operator time goes" if on_cpu else "Where kernel time goes")


def _step_cost(run: Run, ask: Ask, step: int | None = None) -> Titled:
    cost = ask(step_cost, run, step)
    unit = "step" if cost.steps else "window"
    return Titled(cost.parts.assign(per=unit), f"Where the time of a {unit} goes")


def _no_step_cost(frame: Titled) -> str | None:
    known = len(frame.table) and (frame.table["us"] > 0).any()
    return None if known else "Neither step times nor a profiled window were recorded."


def _precision(
    run: Run, ask: Ask, step: int | None = None, phase: str = "forward", folded: bool | None = None
) -> Titled:
    """`folded`: see `precision_cells`."""
    phases = ask(precision_map, run, step).ops["phase"]
    title = f"Modules by operators{f', {phase}' if phases.notna().any() else ''}"
    return Titled(ask(precision_cells, run, step, phase, folded), title)


STEP_COST = View(
    "step_cost",
    "Where the time of a step goes",
    ("steps", "windows", "kernels"),
    _step_cost,
    lambda frame, dark: figures().step_cost_figure(frame.table, dark, frame.title),
    _no_step_cost,
)
TIMELINE = View(
    "timeline",
    "Timeline of a step",
    ("timeline",),
    lambda run, ask: timeline_bars(ask(timeline, run)),
    lambda frame, dark: figures().timeline_figure(frame, dark),
    lambda frame: None if len(frame) else "No profiled step has the times of its kernels.",
)
MEMORY_PARTS = View(
    "memory_parts",
    "Memory at the peak",
    ("memory",),
    _memory_parts,
    lambda frame, dark: figures().memory_parts_figure(frame.table, dark, frame.title),
    _no_memory_parts,
)
MEMORY_MOMENTS = View(
    "memory_moments",
    "Memory through a step",
    ("memory", "steps"),
    _memory_moments,
    lambda frame, dark: figures().memory_moments_figure(
        frame.table, dark, frame.title, tensors_only=frame.tensors_only
    ),
    lambda frame: None if len(frame.table) else "No step's memory was recorded in this run.",
)
TENSOR_CORES = View(
    "tensor_cores",
    "Time on tensor cores",
    ("kernels", "windows", "device", "events"),
    _tensor_cores,
    lambda frame, dark: figures().tensor_core_figure(frame.table, dark, cores=frame.cores),
    lambda frame: None if len(frame.table) else "No GPU kernels were recorded.",
)
KERNELS = View(
    "kernels",
    "Where kernel time goes",
    ("kernels", "windows", "device", "events"),
    _kernels,
    lambda frame, dark: figures().kernel_figure(frame.table, dark, frame.title),
    lambda frame: None if len(frame.table) else "No kernels were recorded.",
)
PRECISION_MAP = View(
    "precision_map",
    "Modules by operators",
    ("ops", "events", "kernels"),
    _precision,
    lambda frame, dark: figures().precision_figure(frame.table, dark, frame.title),
    lambda frame: None if len(frame.table) else "No operators of this kind were traced.",
)
