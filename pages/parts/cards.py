"""The row of numbers at the top: each with its unit, something to compare it with, and its course."""

import streamlit as st

from amp_core import Run
from amp_core.analysis import Overview, memory_trace, scale_trace, sparkline
from pages.parts import glossary, loaders, words


def show(run: Run, view: Overview) -> None:
    """Draw the cards of a run."""
    trace = loaders.analysed(scale_trace, run)
    memory = loaders.analysed(memory_trace, run)
    steps = run.steps
    step_ms = steps["step_ms"].astype(float)
    with st.container(horizontal=True):  # three in a row, fewer on a narrow page
        at_first = "not recorded" if view.loss_first is None else f"{words.loss(view.loss_first)} at first"
        card("Loss", words.loss(view.loss_last), at_first, sparkline(steps["loss"].astype(float)))
        about_scale = glossary.tip("loss scaling")
        if view.scale.has_scaler:
            moved = view.scale.growths or view.scale.backoffs
            moves = f"{view.scale.growths} × up, {view.scale.backoffs} × down" if moved else "has not moved"
            card("Loss scale", words.scale(view.scale.last), moves, sparkline(trace["loss_scale"]), about_scale)
        elif view.scale.last is None:
            card("Loss scale", words.NONE, "not recorded", help_=about_scale)
        else:
            card("Loss scale", "none", "no scaler", sparkline(trace["loss_scale"]), about_scale)
        if view.scale.skips_recorded:
            so_far = sparkline(trace["skipped"].astype(float).cumsum())
            share = f"{words.percent(view.scale.skip_frac)} of steps"
            card("Skipped steps", words.count(view.scale.skips), share, so_far, glossary.tip("skipped step"))
        else:
            card("Skipped steps", words.NONE, "not recorded", help_=glossary.tip("skipped step"))
    with st.container(horizontal=True):
        quartiles = f"{words.number(view.speed.step_ms_low)}–{words.number(view.speed.step_ms_high)} ms"
        warm = f"Median, and where half of the steps lie. The first {view.speed.warmup} warm up and are left out."
        card("Step time", words.number(view.speed.step_ms, "ms"), quartiles, sparkline(step_ms), warm)
        known = view.speed.watch_frac is not None
        watching = f"{words.percent(view.speed.watch_frac)} watching" if known else "watching not timed"
        rate = sparkline(steps["samples"].astype(float) / step_ms)
        share = "Median of samples over step time, and the share of all time that went into watching."
        card("Samples per s", words.number(view.speed.samples_per_s), watching, rate, share)
        peak = words.size(view.memory.peak_bytes)
        held = sparkline(memory["allocated_bytes"] / 2**20)
        card("Peak memory", peak, view.memory.what if view.memory.peak_bytes is not None else "not recorded", held)


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
