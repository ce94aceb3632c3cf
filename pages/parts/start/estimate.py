"""Estimates before a training starts: memory from the model's size, time from similar runs.

estimate.show(fields.state())        # below the form
"""

from collections.abc import Mapping
from typing import Any

import streamlit as st

from amp_core import RunError
from amp_core.analysis import Overview, overview
from amp_core.settings.training import RECIPES, WORKLOADS
from pages.parts import loaders, words
from pages.parts.library.run_list import Entry
from pages.parts.start import devices


def show(state: Mapping[str, Any]) -> None:
    """A line on memory, and one on the time of each chosen precision."""
    workload, name = state["what"]
    size = WORKLOADS[workload].sizes[name]
    batch = size.batch_size if state["batch_size"] is None else state["batch_size"]
    if not isinstance(batch, int) or batch < 1 or not state["precisions"]:
        return  # shown on Start
    needed, there = size.memory_bytes(batch), devices.memory_bytes(state["device"])
    sentence = f"Memory: about {words.size(needed)} of tensors in FP32 with Adam, less in 16 bits"
    if there is not None:
        device = "the machine" if state["device"] == "cpu" else state["device"]
        sentence += f"; {device} has {words.size(there)}" + (", which is **too little**" if needed > there else "")
    times, unknown = [], []
    peaks: dict[str, list[str]] = {}
    for precision in state["precisions"]:
        label, alike = RECIPES[precision].label, measured(workload, name, batch, precision, state["device"])
        if alike is None or alike.speed.step_ms is None or not isinstance(state["steps"], int):
            unknown.append(label)
            continue
        took = words.about(alike.speed.step_ms * state["steps"] / 1000)
        times.append(f"{label} {took}, at {words.number(alike.speed.step_ms, 'ms')} a step")
        if alike.memory.peak_bytes is not None:
            peaks.setdefault(alike.memory.what, []).append(f"{label} {words.size(alike.memory.peak_bytes)}")
    for basis, measured_here in peaks.items():
        sentence += f". At the peak, as measured here: {', '.join(measured_here)} ({basis})"
    known = f"{'; '.join(times)}, as measured here. " if times else ""
    rest = f"{', '.join(unknown)}: unknown, because nothing similar was trained here yet." if unknown else ""
    st.caption(f"{sentence}.  \nTime: {known}{rest}")


def measured(workload: str, size: str, batch: int, precision: str, device: str) -> Overview | None:
    """Overview of the newest ended run with this workload, size, batch, recipe and device; None without one.

    Samples are omitted: they were recorded on another machine.
    """
    asked = {"workload": workload, "size": size, "batch_size": batch, "precision": precision, "device": device}
    entries: dict[str, Entry] = st.session_state["entries"]
    for entry in entries.values():
        config = entry.config or {}
        if entry.mine and entry.status == "finished" and all(config.get(k) == v for k, v in asked.items()):
            try:
                return loaders.analysed(overview, loaders.open_run(entry))
            except RunError:  # damaged: Library shows that
                continue
    return None
