"""A comparison in words and as a table: differences, ratios with their spread, verdicts."""

import pandas as pd
import streamlit as st

from amp_core.analysis import Comparison
from pages.parts import words

TABLE = {
    "run": "Run",
    "precision": "Recipe",
    "step_ms": "Step time (ms)",
    "spread": "Half of steps (ms)",
    "samples_per_s": "Samples/s",
    "speed": "Speed ×",
    "speed_verdict": "Speed verdict",
    "memory_mib": "Peak memory (MiB)",
    "memory_ratio": "Memory ×",
    "loss_final": "Final loss",
    "skipped": "Skipped",
    "scale": "Last scale",
    "eval_loss": "Held-out loss",
}
NUMBERS = {
    TABLE[name]: st.column_config.NumberColumn(format=shape, help=text)
    for name, shape, text in (
        ("step_ms", "%.3g", "Median, warm-up left out"),
        ("samples_per_s", "%.3g", "Median, warm-up left out"),
        ("memory_mib", "%.1f", "1 MiB is 1,048,576 bytes"),
        ("memory_ratio", "%.2f", "Peak memory over that of the first run"),
        ("loss_final", "%.4g", "Mean of the last tenth of the run's own steps"),
        ("eval_loss", "%.4g", "Loss on held-out data after training"),
    )
}
NUMBERS |= {TABLE["run"]: st.column_config.TextColumn(pinned=True)}


def verdict(found: Comparison) -> str:
    """One line per run beside the reference: speed, memory, and whether it learned the same."""
    lines = []
    for row in found.table.iloc[1:].itertuples():
        span = ratio(row.speed_ratio, row.speed_ratio_low, row.speed_ratio_high)
        speed = f"{span} the speed, {row.speed_verdict}"
        costs = f"{speed}; {words.number(row.memory_ratio)} × the memory."
        lines.append(f"- **{words.escape(row.run)}**: {costs} Learning: {words.escape(row.parity)}.")
    return "\n".join([f"Against **{words.escape(found.table['run'].iloc[0])}**:", "", *lines])


def ratio(value: float, low: float, high: float) -> str:
    """A ratio with its interval."""
    return f"{words.number(value)} × ({words.number(low)}–{words.number(high)})" if value == value else words.NONE


def table(found: pd.DataFrame) -> pd.DataFrame:
    """The comparison as people read it."""
    shown = found.assign(
        spread=[f"{words.number(r.step_ms_low)}–{words.number(r.step_ms_high)}" for r in found.itertuples()],
        speed=[ratio(r.speed_ratio, r.speed_ratio_low, r.speed_ratio_high) for r in found.itertuples()],
        memory_mib=found["memory_peak_bytes"] / 2**20,
        skipped=[words.percent(v) for v in found["skip_frac"]],
        scale=[words.scale(v) for v in found["scale_last"]],
    )
    return shown[[name for name in TABLE if shown[name].notna().any()]].rename(columns=TABLE)


def some(settings: "pd.Series[str]", most: int = 4) -> str:
    """The first few settings by name, and how many more."""
    more = len(settings) - most
    return words.escape(", ".join(settings[:most])) + (f" and {more} more" if more > 0 else "")
