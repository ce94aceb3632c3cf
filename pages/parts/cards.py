"""The row of numbers at the top: each with its unit, something to compare it with, and its course."""

import streamlit as st

from amp_core import Run
from amp_core.analysis import Overview, memory_trace, scale_trace, sparkline
from pages.parts import loaders, words


def show(run: Run, view: Overview) -> None:
    """Draw the cards of a run."""
    trace = loaders.analysed(scale_trace, run)
    memory = loaders.analysed(memory_trace, run)
    steps = run.steps
    step_ms = steps["step_ms"].astype(float)
    first, second = st.columns(3), st.columns(3)
    with first[0]:
        at_first = f"{words.loss(view.loss_first)} at first"
        card("Loss", words.loss(view.loss_last), at_first, sparkline(steps["loss"].astype(float)))
    with first[1]:
        if view.scale.has_scaler:
            moved = view.scale.growths or view.scale.backoffs
            moves = f"{view.scale.growths} × up, {view.scale.backoffs} × down" if moved else "has not moved"
            card("Loss scale", words.scale(view.scale.last), moves, sparkline(trace["loss_scale"]))
        else:
            card("Loss scale", "none", "this recipe has no scaler")
    with first[2]:
        so_far = sparkline(trace["skipped"].astype(float).cumsum())
        share = f"{words.percent(view.scale.skip_frac)} of {words.plural(view.scale.attempts, 'step')}"
        card("Skipped steps", words.count(view.scale.skips), share, so_far)
    with second[0]:
        quartiles = f"half within {words.number(view.speed.step_ms_low)}–{words.number(view.speed.step_ms_high)} ms"
        warm = f"Median without the first {words.plural(view.speed.warmup, 'step')}, which warm up."
        card("Step time", words.number(view.speed.step_ms, "ms"), quartiles, sparkline(step_ms), warm)
    with second[1]:
        watching = f"{words.percent(view.speed.watch_frac)} of the time is watching"
        rate = sparkline(steps["samples"].astype(float) / step_ms)
        card("Throughput", words.number(view.speed.samples_per_s, "samples/s"), watching, rate)
    with second[2]:
        peak = words.size(view.memory.peak_bytes)
        card("Peak memory", peak, view.memory.what, sparkline(memory["allocated_bytes"] / 2**20))


def card(label: str, value: str, beside: str, course: list[float] | None = None, help_: str | None = None) -> None:
    """One card; `beside` is what the value is compared with."""
    st.metric(
        label,
        value,
        beside,
        delta_color="off",
        delta_arrow="off",
        border=True,
        height="stretch",
        chart_data=course if course and len(course) > 1 else None,
        help=help_,
    )
