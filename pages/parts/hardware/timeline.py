"""The timeline of one profiled step, with a button that saves it for Perfetto."""

import streamlit as st

from amp_core import Run
from amp_core.analysis import timeline
from amp_core.analysis.performance.timeline import DeviceUse, device_use
from amp_core.interop.perfetto import step_trace
from amp_core.views import TIMELINE
from pages.parts import charts, loaders, words


def show(run: Run) -> None:
    """The chart, how full queue and device were, and the button; nothing for a run without a timeline."""
    rows = loaders.analysed(timeline, run)
    if rows.empty:
        return
    charts.view(TIMELINE, run, "step_cost.timeline")
    if text := sentence(device_use(rows)):
        st.caption(text)
    st.download_button(
        "Save this timeline for Perfetto",
        lambda: step_trace(run),
        file_name="step.json",
        mime="application/json",
        on_click="ignore",
        icon=":material/download:",
        key="timeline.perfetto",
    )


def sentence(use: DeviceUse) -> str:
    """Queue, occupancy and small kernels in words, as far as they were recorded."""
    parts = []
    if use.queue_length is not None:
        parts.append(
            f"Mean launch queue: {words.number(use.queue_length)} kernels; it is empty "
            f"{words.percent(use.queue_empty_frac)} of the time."
        )
    if use.occupancy_frac is not None:
        parts.append(f"Estimated occupancy: {words.percent(use.occupancy_frac)} over kernel time.")
    if use.small_frac:
        parts.append(f"{words.percent(use.small_frac)} of kernel time is in kernels with less than one block per SM.")
    return " ".join(parts)
