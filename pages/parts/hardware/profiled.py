"""What the pages on profiled windows share: choosing a window, recording one, kernel names in tables."""

import pandas as pd

from amp_core import Run
from amp_core.analysis import profiled_windows, step_cost, timeline
from amp_core.analysis.performance.collectives import collective_table
from amp_core.formats import FORMATS
from pages.parts import address, loaders, tables, words

HOW = (
    "Record one with `watch(…, profile=(50, 53))` in your own loop or `ampscope train … --profile 50:53`: steps 50, 51 "
    "and 52. A trace that `torch.profiler` wrote opens too: `ampscope import-trace TRACE --out RUN`."
)
TIME_MS = tables.measured("Time (ms)", width=80, help_="All launches of the window together")
COUNT = tables.count("Launches")


def prepare(run: Run) -> None:
    """Run the analyses that the page on step cost needs first."""
    loaders.analysed(profiled_windows, run)
    loaders.analysed(step_cost, run, None)
    for function in (timeline, collective_table):
        loaders.analysed(function, run)


def pick(run: Run) -> int | None:
    """The first step of the window to show; None for all windows together, or if there is only one."""
    windows = loaders.analysed(profiled_windows, run)
    known = windows.dropna(subset=["step"])
    if len(windows) < 2 or known.empty:
        return None
    labels = {-1: "all windows"} | {int(w.step): span(w.step, w.steps) for w in tables.rows(known)}
    key = f"profiled.window.{len(labels) - 1}"
    choice = address.choose("window", "Profiled steps", list(labels), -1, key, format_func=labels.get)
    return None if choice < 0 else choice


def coverage(run: Run, step: int | None) -> str:
    """Which steps were profiled, and on how many devices."""
    windows = loaders.analysed(profiled_windows, run)
    chosen = windows if step is None else windows[windows["step"] == step]
    spans = [span(w.step, w.steps) for w in tables.rows(chosen)]
    where = f" on {words.plural(int(chosen['devices'].max()), 'device')}" if chosen["devices"].max() > 1 else ""
    return f"Profiled: {', '.join(spans[:4])}{' …' if len(spans) > 4 else ''}{where}."


def span(first: float, steps: float) -> str:
    """The steps of a window as text."""
    if first != first:
        return "a window without step markers"
    last = first + steps - 1 if steps == steps else first
    return f"step {first:,.0f}" if last <= first else f"steps {first:,.0f}–{last:,.0f}"


def milliseconds(table: pd.DataFrame) -> pd.DataFrame:
    """The table with `total_us` in milliseconds as `total_ms`, formats as in the sentences, and unknown names as an en
    dash."""
    texts = table.select_dtypes(include=["object", "string"]).columns
    shown = table.assign(total_ms=table["total_us"] / 1e3)
    if "precision" in shown:
        shown["precision"] = [FORMATS[name].label if name in FORMATS else name for name in shown["precision"]]
    return shown.assign(**{name: shown[name].where(shown[name] != "", words.NONE) for name in texts})
