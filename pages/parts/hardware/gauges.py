"""The row of gauges: what the GPU is doing now, or one sentence why that is not known."""

import streamlit as st

from amp_core import Run
from amp_core.analysis import DeviceNow, device_now, device_samples, not_recorded_reasons, sparkline
from amp_core.analysis.performance.devices import SHARES
from amp_core.hardware.device_types import is_accelerator
from pages.parts import cards, words

UTILISATION = "Share of time in which any kernel ran. It says nothing about tensor cores."
TENSOR = (
    "Share of time in which the tensor cores' pipe was busy, and beside it that of the multiprocessors (SMs), both "
    "counted by the GPU: Hopper and newer."
)
MEMORY = "In use on the device by all processes, the CUDA context included."
CLOCKS = "With the reason if the clocks are held down."


def show(run: Run) -> None:
    """Draw the gauges of a run; a sentence if it has no samples."""
    now = device_now(run)
    if not now.samples:
        st.caption(_why_none(run))
        return
    frame = device_samples(run)
    course = {c: sparkline(frame[c]) for c in (*SHARES, "memory_used_bytes", "power_w", "temperature_c")}
    counted, around = cards.pairs()  # a single row if there is room: the charts below matter more
    with counted:
        cards.card("GPU busy", words.percent(now.gpu_util_frac), _clocks(now), course["gpu_util_frac"], UTILISATION)
        active = now.tensor_active_frac
        beside = f"SMs {words.percent(now.sm_active_frac)}" if active is not None else "not counted"
        cards.card("Tensor cores", words.percent(active), beside, course["tensor_active_frac"], TENSOR)
        total = f"of {words.size(now.memory_total_bytes)}" if now.memory_total_bytes else "all processes"
        cards.card("Device memory", words.size(now.memory_used_bytes), total, course["memory_used_bytes"], MEMORY)
    with around:
        limit = f"of {words.number(now.power_limit_w, 'W')}" if now.power_limit_w else "no limit known"
        cards.card("Power", words.number(now.power_w, "W"), limit, course["power_w"])
        held = "clocks free" if now.throttle in (None, "none", "idle") else now.throttle
        cards.card("Temperature", words.number(now.temperature_c, "°C"), held, course["temperature_c"], CLOCKS)


def _clocks(now: DeviceNow) -> str:
    return f"{words.number(now.sm_clock_mhz, 'MHz', 4)}" if now.sm_clock_mhz is not None else "any kernel"


def _why_none(run: Run) -> str:
    """Why there are no gauges, in one sentence."""
    reasons = [reason for reason in not_recorded_reasons(run) if reason.startswith("device samples")]
    if reasons:
        return f"No device gauges: {words.escape(words.sentence(reasons[0].partition(': ')[2] or reasons[0]))}"
    if is_accelerator(run.head.config.get("device")):
        return "No device gauges yet: the GPU has not been sampled."
    return "No device gauges: they need an NVIDIA GPU, and this run is on a CPU."
