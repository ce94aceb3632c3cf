"""The row of numbers at the top: each with its unit, something to compare it with, and its course.

The course is a picture made here: six of Streamlit's own (`chart_data=`) take the browser a quarter of a second, and
again at each look at a live run.
"""

import base64

import numpy as np
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
    told, each = steps.get("stands_for"), trace["stands_for"]
    octaves = sparkline(
        np.log2(trace["loss_scale"].where(trace["loss_scale"] > 0)), weights=each
    )  # each halving as high as another
    with st.container(horizontal=True):  # three in a row, fewer on a narrow page
        at_first = "not recorded" if view.loss_first is None else f"{words.loss(view.loss_first)} at first"
        card("Loss", words.loss(view.loss_last), at_first, sparkline(steps["loss"].astype(float), weights=told))
        about_scale = glossary.tip("loss scaling")
        if view.scale.has_scaler:
            moved = view.scale.growths or view.scale.backoffs
            moves = f"{view.scale.growths} × up, {view.scale.backoffs} × down" if moved else "has not moved"
            card("Loss scale", words.scale(view.scale.last), moves, octaves, about_scale)
        elif view.scale.last is None:
            card("Loss scale", words.NONE, "not recorded", help_=about_scale)
        else:
            card("Loss scale", "none", "no scaler", octaves, about_scale)
        if view.scale.skips_recorded:
            so_far = sparkline((trace["skipped"] * each).astype(float).cumsum(), weights=each)
            share = f"{words.percent(view.scale.skip_frac)} of steps"
            card("Skipped steps", words.count(view.scale.skips), share, so_far, glossary.tip("skipped step"))
        else:
            card("Skipped steps", words.NONE, "not recorded", help_=glossary.tip("skipped step"))
    with st.container(horizontal=True):
        quartiles = f"{words.number(view.speed.step_ms_low)}–{words.number(view.speed.step_ms_high)} ms"
        warm = f"Median, and where half of the steps lie. The first {view.speed.warmup} warm up and are left out."
        card("Step time", words.number(view.speed.step_ms, "ms"), quartiles, sparkline(step_ms, weights=told), warm)
        known = view.speed.watch_frac is not None
        watching = f"{words.percent(view.speed.watch_frac)} watching" if known else "watching not timed"
        rate = sparkline(steps["samples"].astype(float) / step_ms, weights=told)
        share = "Median of samples over step time, and the share of all time that went into watching."
        card("Samples per s", words.number(view.speed.samples_per_s), watching, rate, share)
        peak = words.size(view.memory.peak_bytes)
        held = sparkline(memory["allocated_bytes"] / 2**20, weights=memory["stands_for"])
        card("Peak memory", peak, view.memory.what if view.memory.peak_bytes is not None else "not recorded", held)


def card(label: str, value: str, beside: str, course: list[float] | None = None, help_: str | None = None) -> None:
    """One card; `beside` is what the value is compared with."""
    drawn = course is not None and len(course) > 1
    box = st.container(border=True, height="stretch", gap="xsmall") if drawn else st.container(height="stretch")
    with box:
        st.metric(
            label,
            value,
            beside,
            delta_color="off",
            delta_arrow="off",
            border=not drawn,
            height="content" if drawn else "stretch",
            help=help_,
        )
        if drawn:
            st.html(_picture(label, course))


def _picture(label: str, course: list[float]) -> str:
    """A line from the first value to the last, stretched to the card's width. Its grey is readable on both themes."""
    values = np.asarray(course)
    low, high = values.min(), values.max()
    down = 38 - 36 * (values - low) / (high - low) if high > low else np.full(len(values), 20.0)
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(np.linspace(0, 200, len(values)), down, strict=True))
    look = 'fill="none" stroke="#7C888E" stroke-width="2" vector-effect="non-scaling-stroke"'
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 200 40" preserveAspectRatio="none">'
        f'<polyline points="{points}" {look}/></svg>'
    )
    said = f"{label} over the run: from {values[0]:.3g} to {values[-1]:.3g}, between {low:.3g} and {high:.3g}"
    encoded = base64.b64encode(svg.encode()).decode()
    return f'<img src="data:image/svg+xml;base64,{encoded}" alt="{said}" style="width:100%;height:40px;display:block">'
