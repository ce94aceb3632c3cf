"""A comparison as text and tables: differing settings, and ratios with their spread."""

from typing import Any

import pandas as pd
import streamlit as st

from amp_core.analysis import Comparison
from pages.parts import words
from pages.parts.tables import measured, rows
from pages.parts.tables import show as show_table

RECIPES = {
    "recipe": "Recipe",
    "seeds": "Seeds",
    "step_ms": "Step time (ms)",
    "samples_per_s": "Samples/s",
    "speed": "Speed ×",
    "speed_verdict": "Speed is",
    "memory_mib": "Peak (MiB)",
    "memory_ratio": "Memory ×",
    "energy_j": "Energy (J/sample)",
    "tensor": "On tensor cores",
    "loss_final": "Final loss",
    "loss_change": "Loss change",
    "eval_loss": "Held-out loss",
    "skipped": "Skipped",
    "parity": "Convergence parity",
}
"""Columns of the table of recipes."""
RUNS = {
    "run": "Run",
    "precision": "Recipe",
    "step_ms": "Step time (ms)",
    "spread": "Half of steps (ms)",
    "samples_per_s": "Samples/s",
    "speed": "Speed ×",
    "speed_verdict": "Speed is",
    "memory_mib": "Peak (MiB)",
    "memory_ratio": "Memory ×",
    "loss_final": "Final loss",
    "skipped": "Skipped",
    "scale": "Last scale",
    "eval_loss": "Held-out loss",
}
"""Columns of the table of runs."""
_MEASURED = {
    "step_ms": "Median, warm-up left out",
    "samples_per_s": "Median, warm-up left out",
    "memory_mib": "Peak memory; 1 MiB is 1,048,576 bytes",
    "energy_j": "Mean power of the GPU times step time, over samples of a step",
}
_SHAPES = {
    "memory_ratio": ("%.2f", "Peak memory over that of the first"),
    "loss_final": ("%.4g", "Mean of the last tenth of the run's own steps"),
    "eval_loss": ("%.4g", "Loss on held-out data after training"),
}
NUMBERS = {(RECIPES | RUNS)[name]: measured(help_=text) for name, text in _MEASURED.items()} | {
    (RECIPES | RUNS)[name]: st.column_config.NumberColumn(format=shape, help=text)
    for name, (shape, text) in _SHAPES.items()
}
NUMBERS[RECIPES["loss_change"]] = st.column_config.TextColumn(help="Of the final loss, against the first recipe")
LONG = 28
"""Names with more letters than this are not pinned: the column would leave no room for the numbers."""


def headline(comparison: Comparison) -> None:
    """The answer, one line per recipe, and the baseline of the comparison."""
    first = comparison.recipes.iloc[0]
    answers = {name: answer.partition(": ")[2] for name, answer in comparison.answers.items()}
    lines = [f"**{words.escape(name)}**: {words.escape(answer)}" for name, answer in answers.items()]
    against = f"Against **{words.escape(first['recipe'])}**"
    repeated = f", {words.plural(int(first['seeds']), 'seed')} of it" if first["seeds"] > 1 else ""
    # One answer is the page's headline; several are a list, which is easier to read.
    if len(lines) == 1:
        st.markdown(f"## {lines[0]}")
        st.markdown(f"{against}{repeated}.")
    else:
        st.markdown("\n".join((f"{against}{repeated}:\n", *(f"- {line}" for line in lines))))


def settings(comparison: Comparison) -> None:
    """The settings that differ between the runs."""
    if not len(comparison.differences):
        st.caption("No recorded setting differs between these runs.")
        return
    st.markdown(f"What differs: {some(comparison.differences['setting'])}.")
    show_table(comparison.differences.rename(columns={"setting": "Setting"}), alt="Settings.")


def tables(comparison: Comparison) -> None:
    """The recipes, with a copy button; the runs behind them if a recipe has several."""
    shown = recipes(comparison.recipes)
    alt = "One row per recipe, beside the first."
    config = NUMBERS | {RECIPES["recipe"]: _pinned(shown[RECIPES["recipe"]])}
    show_table(shown, column_config=config, alt=alt)
    if comparison.notes:
        st.caption(" ".join(_with_code(note) for note in comparison.notes))
    with st.expander("Copy as Markdown, and every run"):
        st.code(markdown(shown), language="markdown")
        each = runs(comparison.table)
        config = NUMBERS | {RUNS["run"]: _pinned(each[RUNS["run"]])}
        alt = "One row per run, beside the first."
        show_table(each, column_config=config, alt=alt)


def _with_code(note: str) -> str:
    """A note of the comparison for Markdown; commands in it stand between backquotes."""
    return "`".join(words.escape(part) if i % 2 == 0 else part for i, part in enumerate(note.split("`")))


def _pinned(names: "pd.Series[str]") -> Any:
    """The column of names."""
    return st.column_config.TextColumn(pinned=True, width=220 if names.str.len().max() > LONG else None)


def recipes(frame: pd.DataFrame) -> pd.DataFrame:
    """The recipes as text."""
    shown = frame.assign(
        speed=[words.ratio(r.speed_ratio, r.speed_ratio_low, r.speed_ratio_high) for r in rows(frame)],
        memory_mib=frame["memory_peak_bytes"] / 2**20,
        tensor=[words.percent(v) for v in frame["tensor_frac"]],
        skipped=[words.share_of(s, n) for s, n in zip(frame["skips"], frame["steps"], strict=True)],
        speed_verdict=frame["speed_verdict"].replace("reference", "baseline"),
        parity=frame["parity"].replace("reference", "baseline"),
        loss_change=[change(r.loss_change_frac, r.loss_change_low, r.loss_change_high) for r in rows(frame)],
    )
    shown["tensor"] = shown["tensor"].where(frame["tensor_frac"].notna())
    if frame["loss_change_frac"].isna().all():  # the runs train different tasks
        shown["loss_change"] = None
    return shown[[name for name in RECIPES if shown[name].notna().any()]].rename(columns=RECIPES)


def change(value: float, low: float, high: float) -> str:
    """A deviation in percent, with its interval if known."""
    if value != value:
        return words.NONE
    interval = f" ({_signed(low)} to {_signed(high)} %)" if low == low else ""
    return f"{_signed(value)} %{interval}"


def _signed(fraction: float) -> str:
    return f"{'+' if fraction >= 0 else ''}{words.number(100 * fraction, digits=2)}"


def runs(frame: pd.DataFrame) -> pd.DataFrame:
    """The runs as text."""
    shown = frame.assign(
        spread=[words.span(r.step_ms_low, r.step_ms_high) for r in rows(frame)],
        speed=[words.ratio(r.speed_ratio, r.speed_ratio_low, r.speed_ratio_high) for r in rows(frame)],
        speed_verdict=frame["speed_verdict"].replace("reference", "baseline"),
        memory_mib=frame["memory_peak_bytes"] / 2**20,
        skipped=[words.share_of(s, n) for s, n in zip(frame["skips"], frame["steps"], strict=True)],
        scale=[words.scale(v) for v in frame["scale_last"]],
    )
    return shown[[name for name in RUNS if shown[name].notna().any()]].rename(columns=RUNS)


def markdown(shown: pd.DataFrame) -> str:
    """A table as Markdown, for a report or an issue."""

    def cell(value: object) -> str:
        text = words.number(value) if isinstance(value, float) else str(value)
        return text.replace("|", "\\|").replace("\n", " ")

    rows = [[cell(value) for value in row] for row in shown.itertuples(index=False)]
    lines = [list(shown.columns), ["---"] * len(shown.columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def some(names: "pd.Series[str]", most: int = 4) -> str:
    """The first few settings by name, and how many more there are."""
    more = len(names) - most
    return words.escape(", ".join(names[:most])) + (f" and {more} more" if more > 0 else "")
