"""Tables of the Memory page."""

import pandas as pd
import streamlit as st

from amp_core import Run
from amp_core.analysis import (
    MemoryBreakdown,
    memory_breakdown,
    memory_moments,
    memory_phases,
    memory_steps,
    not_recorded_reasons,
)
from amp_core.settings.training import WORKLOADS
from pages.parts import loaders, tables, words

RESERVED = (
    "Allocated by torch, at most. Reserved is what its allocator held of the device at that moment, in use or not: the "
    "device shows that as used, and more for the CUDA context and other processes."
)
CPU = (
    "On a CPU nothing counts allocations. The categories are sums over tensors; the process as a whole, Python and "
    "libraries included, is the resident set."
)
PHASES = "The most that was held at any moment of that phase of the step."
PART = 185
"""Pixels of the longest, autocast's copies of weights."""
TABLE = {
    "Part": st.column_config.TextColumn(pinned=True, width=PART),
    "Held": st.column_config.TextColumn(),
    "Share": tables.share("Share", help_="Of the peak; on a CPU, of what tensors hold."),
    "What it is": st.column_config.TextColumn(width="large"),
}
CHANGES = {
    "Run": st.column_config.TextColumn(),
    "Part": st.column_config.TextColumn(pinned=True, width=PART),
    "Baseline": st.column_config.TextColumn(),
    "This run": st.column_config.TextColumn(),
    "Difference": st.column_config.TextColumn(),
    "Why": st.column_config.TextColumn(width="large"),
}

MODULES = {
    "name": st.column_config.TextColumn("Module or operator", pinned=True, width=300),
    "phase": st.column_config.TextColumn("Phase"),
    "count": tables.count("Times"),
    "peak_mib": tables.measured("Highest (MiB)"),
    "kept_mib": st.column_config.NumberColumn("Kept (MiB)", format="%+.3g", help="Allocated there less freed there."),
}


def modules(frame: pd.DataFrame) -> pd.DataFrame:
    """Memory by module as text and MiB."""
    shown = frame.assign(
        peak_mib=frame["peak_bytes"] / 2**20,
        kept_mib=frame["kept_bytes"] / 2**20,
        name=frame["name"].replace("", "between operators"),
        phase=frame["phase"].fillna(words.NONE),
    )
    return shown[list(MODULES)]


def prepare(run: Run) -> None:
    """Run the analyses that the page needs first."""
    for step in loaders.analysed(memory_steps, run)[-1:]:
        for function in (memory_breakdown, memory_phases, memory_moments):
            loaders.analysed(function, run, step)
        loaders.analysed(not_recorded_reasons, run)


def table(breakdown: MemoryBreakdown) -> pd.DataFrame:
    """The categories at the peak as text. On a CPU, shares are of the tensors' memory: the process's would hide
    them."""
    tensors = breakdown.named["bytes"].sum()

    def share(category: str, size: float, frac: float) -> float | None:
        if not breakdown.on_cpu:
            return frac
        return size / tensors if category != "other" and tensors else None

    rows = [
        {
            "Part": part.label,
            "Held": words.size(part.bytes),
            "Share": share(part.category, part.bytes, part.frac),
            "What it is": part.about,
        }
        for part in tables.rows(breakdown.parts)
        if part.bytes != 0
    ]
    return pd.DataFrame(rows, columns=list(TABLE))


def changes(frame: pd.DataFrame) -> pd.DataFrame:
    """`memory_difference` as text, with one row per run and category that either run held."""
    rows = [
        {
            "Run": part.run,
            "Part": part.label,
            "Baseline": words.size(part.first_bytes),
            "This run": words.size(part.bytes),
            "Difference": signed(part.difference_bytes),
            "Why": part.why,
        }
        for part in tables.rows(frame)
        if part.first_bytes or part.bytes
    ]
    return pd.DataFrame(rows, columns=list(CHANGES))


def larger_batch(run: Run) -> str:
    """How to find the largest batch that fits; empty for a user's own workload, which makes its own batches."""
    config = run.head.config
    if config.get("workload") not in WORKLOADS:
        return ""
    flags = ("workload", "size", "precision", "device")
    asked = "".join(f" --{flag} {config[flag]}" for flag in flags if isinstance(config.get(flag), str))
    return f"To find the largest batch that fits: `ampscope tune --max-batch{asked.replace('`', '')}`."


def signed(bytes_: float) -> str:
    """A difference of sizes with its sign."""
    if bytes_ != bytes_ or bytes_ == 0:
        return words.size(bytes_)
    return f"{'+' if bytes_ > 0 else '−'}{words.size(abs(bytes_))}"
