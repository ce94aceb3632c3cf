"""The chosen baseline on a page: its run, and how the shown run differs from it.

base = baseline.run()                        # None without a baseline
baseline.differences(run)                    # one line below the run's name
"""

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
import streamlit as st

from amp_core import Run, RunError
from amp_core.analysis import baseline_changes, scale_summary
from pages.parts import bar, loaders, words
from pages.parts.library.run_list import Entry

MAX_REPEATS = 4
"""Runs of the baseline with other seeds that are read for its noise band."""
OWN_SETTINGS = ("seed", "comparison", "name", "out", "resume")
"""Settings in which repeats of one training may differ."""
LABELS = {
    "loss": "Loss",
    "step_ms": "Step time",
    "memory_bytes": "Memory",
    "skip_frac": "Skipped steps",
    "grad_norm": "Gradient norm",
}
NOISE_HELP = (
    "In brackets the baseline's noise band. Loss: two standard deviations over seeds; with fewer than three seeds, two "
    "standard errors of the mean over its last steps. Step time and gradient norm: the middle half of its steps."
)
EVERYWHERE = ("loss", "step_ms", "memory_bytes")
BY_PAGE = {
    "loss-scale": ("skip_frac", "grad_norm", "loss"),
    "number-ranges": ("grad_norm", "loss"),
    "layer-detail": ("grad_norm", "loss"),
    "low-bits": ("loss", "grad_norm"),
    "updates": ("loss", "grad_norm"),
    "memory": ("memory_bytes", "step_ms"),
    "tensor-cores": ("step_ms", "memory_bytes"),
    "step-cost": ("step_ms", "memory_bytes"),
    "precision-map": ("step_ms", "loss"),
    "forecast": ("step_ms", "memory_bytes"),
}
"""What a page's first line compares, by its address; `EVERYWHERE` on the others."""


def run(table: str = "steps") -> Run | None:
    """The baseline, in the chosen steps; None if there is none, or it cannot be read or has neither steps nor rows in
    `table`."""
    entry = bar.baseline()
    return _opened(entry, table) if entry is not None and entry.readable else None


def repeats() -> list[Run]:
    """The baseline and, for its noise band, its repeats with other seeds."""
    entry, first = bar.baseline(), run()
    if entry is None or first is None:
        return []
    entries: dict[str, Entry] = st.session_state["entries"]
    alike = [e for e in entries.values() if e.key not in (entry.key, st.session_state["run"]) and _repeats(e, entry)]
    return [first, *(one for one in map(_opened, alike[:MAX_REPEATS]) if one is not None)]


def answer(table: str, of: Callable[[Run], str]) -> None:
    """What the page says of the baseline, beside what it says of the shown run: `of` gives it in one sentence. Nothing
    without a baseline or without rows in `table`."""
    base = run(table)
    if base is not None and base.table(table).num_rows:
        st.markdown(words.unbroken(f"Baseline **{words.escape(base.name)}**: {of(base)}"))


def changes_in_words(changes: pd.DataFrame, base: str, noun: str, what: str, text: Callable[[float], str]) -> str:
    """How many rows of `changes` (name and the columns of `mean_changes`) differ from the run `base` by more than its
    noise, and which one the most; `text` writes a value."""
    against = f"Against **{words.escape(base)}**"
    if not len(changes):
        return f"{against}: no step was recorded in both, so their {what} cannot be compared."
    outside, count = changes[changes["outside"]], words.plural(len(changes), noun)
    if not len(outside):
        return f"{against}: none of {count} differs in {what} by more than the noise."
    most = outside.iloc[0]
    noise = f" ± {text(most['noise'])}" if most["noise"] == most["noise"] else ""
    differ = "differs" if len(outside) == 1 else "differ"
    return words.unbroken(
        f"{against}: **{len(outside):,} of {count} {differ} in {what}** by more than the noise. "
        f"Most: {words.escape(most['name'])}, {text(most['value'])} instead of {text(most['baseline'])}{noise}."
    )


def differences(shown: Run) -> None:
    """One line: how the run differs from the baseline in what the page is about, each with its noise band."""
    entry, bases = bar.baseline(), repeats()
    if entry is None or not bases or shown.steps.empty:
        return
    changes = {row["metric"]: row for _, row in loaders.analysed(baseline_changes, [*bases, shown]).iterrows()}
    metrics = BY_PAGE.get(st.session_state.get("address.page", ""), EVERYWHERE)
    texts = [
        skipped(shown, bases[0]) if metric == "skip_frac" else difference(metric, changes[metric])
        for metric in metrics
        if metric in changes
    ]
    if texts:
        line = f"Against **{words.escape(entry.name)}**: {' · '.join(texts)}"
        st.markdown(words.unbroken(line), help=NOISE_HELP)


def skipped(shown: Run, base: Run) -> str:
    """`Skipped steps 1 of 400, baseline 0 of 400`: of a few steps, a percentage would be false precision."""
    counts = [loaders.analysed(scale_summary, one) for one in (shown, base)]
    own, others = (words.share_of(about.skips, about.attempts) for about in counts)
    return f"{LABELS['skip_frac']} {own}, baseline {others}"


def difference(metric: str, change: "pd.Series[Any] | Mapping[str, Any]") -> str:
    """One row of `baseline_changes` as text: `Loss +3.6 % (within noise −3.7 % to +3.7 %)`."""
    value, base = float(change["value"]), float(change["baseline"])
    label = LABELS[metric]
    if value != value:
        return f"{label} not finite"
    low, high = float(change["low"]), float(change["high"])
    noise = ""
    if low == low and high == high and base:
        within = "" if change["outside"] else "within "
        noise = f" ({within}noise {_signed(low / base - 1, 2)} to {_signed(high / base - 1, 2)})"
    ratio = value / base if base else float("nan")
    if ratio != ratio:
        return f"{label} {words.number(value)}, baseline {words.number(base)}"
    if ratio >= 2 or ratio <= 0.5:
        text = f"{words.number(ratio)} ×"
    elif value == base:
        text = "the same"
    else:
        text = _signed(ratio - 1, 3)
    return f"{label} **{text}**{noise}" if change["outside"] else f"{label} {text}{noise}"


def _signed(fraction: float, digits: int) -> str:
    sign = "+" if fraction > 0 else "−" if fraction < 0 else ""
    return f"{sign}{words.number(100 * abs(fraction), '%', digits)}"


def _opened(entry: Entry, table: str = "steps") -> Run | None:
    try:
        opened = bar.in_range(loaders.open_run(entry))
    except RunError:  # Library shows why
        return None
    return opened if len(opened.steps) or opened.table(table).num_rows else None


def _repeats(entry: Entry, base: Entry) -> bool:
    """Whether two runs differ in their seed alone."""
    ours, theirs = dict(entry.config or {}), dict(base.config or {})
    if not ours or entry.origin != base.origin or entry.status != "finished" or ours.get("seed") == theirs.get("seed"):
        return False
    names = (ours.keys() | theirs.keys()) - set(OWN_SETTINGS)
    return all(ours.get(name) == theirs.get(name) for name in names)
