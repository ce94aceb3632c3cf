"""The row of numbers at the top of a page: each with its unit, a comparison and its course over the run.

The course is an SVG made here: six of Streamlit's own charts (`chart_data=`) take the browser a quarter of a second,
and again at each tick of a live run.
"""

import base64
from dataclasses import dataclass

import numpy as np
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from amp_core import Run
from amp_core.analysis import Overview, memory_trace, scale_trace, sparkline
from amp_core.analysis.steps import attempts
from amp_core.text.formatting import number
from pages.parts import glossary, words

ACROSS = 6
"""Cards with a course per row."""
WHOLE = "<style>{0}, {0} *, {1}, {1} * {{white-space: normal; overflow: visible}}</style>".format(
    '[data-testid="stMetric"] [data-testid="stMetricLabel"]', '[data-testid="stMetric"] [data-testid="stMetricDelta"]'
)
"""Wraps the label and the comparison, which Streamlit would cut off."""
_WRAPS = [
    f'[data-testid="stLayoutWrapper"]:has(> {within}[data-testid="stVerticalBlock"] > * > [data-testid="stMetric"])'
    for within in ("", '[data-testid="stHorizontalBlock"] > * > ')
]
"""A card and a pair of cards: Streamlit's minimum width of 128 pixels would cut "3.06 MiB" off."""


@dataclass(frozen=True)
class Card:
    """The content of one card; `beside` is what the value is compared with."""

    label: str
    value: str
    beside: str
    course: list[float] | None = None
    help: str | None = None

    @property
    def known(self) -> bool:
        """Whether the value was recorded."""
        return self.value != words.NONE


def show(run: Run, view: Overview) -> None:
    """Draw the cards of a run. If the run has ended, a line below names what was not recorded."""
    cards = [_loss(run, view), *_scaling(run, view), *_speed(run, view), _memory(run, view)]
    shown = cards if view.status == "running" else [one for one in cards if one.known]
    st.html(WHOLE)
    for first in range(0, len(shown), ACROSS):
        with st.container(horizontal=True, gap="xsmall"):  # a narrow page has no pixels to spare: 4.00 GiB
            for one in shown[first : first + ACROSS]:
                card(one.label, one.value, one.beside, one.course, one.help)
    if missing := [one.label.lower() for one in cards if one not in shown]:
        st.caption(f"Not recorded: {', '.join(missing)}.")


def _loss(run: Run, view: Overview) -> Card:
    at_first = "not recorded" if view.loss_first is None else f"{words.loss(view.loss_first)} at first"
    course = sparkline(run.steps["loss"].astype(float))
    last = "Mean of the last tenth of the steps, and the loss of the first."
    return Card("Loss", words.loss(view.loss_final), at_first, course, last)


def _scaling(run: Run, view: Overview) -> tuple[Card, Card]:
    """The loss scale and the skipped steps."""
    trace = scale_trace(run)
    octaves = np.log2(trace["loss_scale"].where(trace["loss_scale"] > 0))  # each halving has the same height
    value, beside = "none", "no scaler"
    course: list[float] | None = sparkline(octaves)
    if view.scale.has_scaler:
        moved = view.scale.growths or view.scale.backoffs
        value = words.scale(view.scale.last)
        beside = f"{view.scale.growths:,} up, {view.scale.backoffs:,} down" if moved else "unchanged"
    elif view.scale.last is None:
        value, beside, course = words.NONE, "not recorded", None
    scale = Card("Loss scale", value, beside, course, glossary.tip("loss scaling"))
    about_skips = glossary.tip("skipped step")
    if not view.scale.skips_recorded:
        return scale, Card("Skipped steps", words.NONE, "not recorded", help=about_skips)
    so_far = sparkline(trace["skipped"].astype(float).cumsum())
    attempted = f"of {words.count(view.scale.attempts)} steps"
    return scale, Card("Skipped steps", words.count(view.scale.skips), attempted, so_far, about_skips)


def _speed(run: Run, view: Overview) -> tuple[Card, Card]:
    """Step time and samples per second."""
    speed = view.speed
    timed = attempts(run).iloc[speed.warmup :]  # what the summary counts: the curve and the numbers agree
    if speed.step_ms_low is None:
        beside, how = f"mean of {speed.steps:,} steps", "Mean over the steps of the trace."
    else:
        varies = speed.step_ms_low != speed.step_ms_high
        beside = words.span(speed.step_ms_low, speed.step_ms_high, "ms") if varies else "quartiles"
        how = f"Median and quartiles, without the first {words.plural(speed.warmup, 'step')} (warm-up)."
    beside = "of one step" if speed.steps == 1 else beside
    known = speed.watch_frac is not None
    watching = f"{words.percent(speed.watch_frac)} recording" if known else "overhead not timed"
    rate = sparkline(1e3 * timed["samples"] / timed["step_ms"])
    share = "Median of samples over step time, and the share of all time spent on recording."
    return (
        Card("Step time", words.number(speed.step_ms, "ms"), beside, sparkline(timed["step_ms"]), how),
        Card("Samples/s", words.number(speed.samples_per_s), watching, rate, share),
    )


def _memory(run: Run, view: Overview) -> Card:
    memory = memory_trace(run)
    held = sparkline(memory["allocated_bytes"] / 2**20)
    beside = (
        "not recorded"
        if view.memory.peak_bytes is None
        else view.memory.what.partition(" of ")[0].removeprefix("allocated by torch ")
    )
    if view.memory.tensors_peak_bytes is not None:
        process = f"in tensors; process {words.size(view.memory.peak_bytes)}"
        most = "The most that the tensors of a sampled step held. The curve is the resident set of the process."
        return Card("Peak memory", words.size(view.memory.tensors_peak_bytes), process, held, most)
    return Card(
        "Peak memory", words.size(view.memory.peak_bytes), beside, held, f"Highest at any step: {view.memory.what}."
    )


def pairs() -> list[DeltaGenerator]:
    """Two containers for two or three cards each: side by side, or one below the other on a narrow page."""
    row = st.container(horizontal=True)
    widths = " ".join(f"{one} {{min-width: {px}px}}" for one, px in zip(_WRAPS, (150, 316), strict=True))
    row.html(f"{WHOLE}<style>{widths}</style>")
    return [row.container(horizontal=True) for _ in range(2)]


def card(label: str, value: str, beside: str, course: list[float] | None = None, help_: str | None = None) -> None:
    """Draw one card; `beside` is what the value is compared with."""
    values = course or []
    drawn = len(values) > 1
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
            st.html(_picture(label, values))


def _picture(label: str, course: list[float]) -> str:
    """An SVG line through the values, as wide as the card. Its grey is readable on both themes."""
    values = np.asarray(course)
    low, high = values.min(), values.max()
    down = 38 - 36 * (values - low) / (high - low) if high > low else np.full(len(values), 20.0)
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(np.linspace(0, 200, len(values)), down, strict=True))
    style = 'fill="none" stroke="#7C888E" stroke-width="2" vector-effect="non-scaling-stroke"'
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 200 40" preserveAspectRatio="none">'
        f'<polyline points="{points}" {style}/></svg>'
    )
    first, last, lowest, highest = map(number, (values[0], values[-1], low, high))
    alt = f"{label} over the run: from {first} to {last}, between {lowest} and {highest}"
    encoded = base64.b64encode(svg.encode()).decode()
    return f'<img src="data:image/svg+xml;base64,{encoded}" alt="{alt}" style="width:100%;height:40px;display:block">'
