"""The ranks of a distributed training side by side."""

import pandas as pd
import streamlit as st

from amp_core import Run
from amp_core.analysis import rank_scales, rank_table, scale_summary
from amp_core.analysis.ranks import RankSpread, rank_spread
from amp_core.views import RANK_SCALES, RANKS
from pages.parts import charts, loaders, tables, words

NOTABLE = 0.05
"""From this share of the step spent waiting for it, a rank is called slow."""

COLUMNS = {
    "rank": st.column_config.NumberColumn("Rank", pinned=True),
    "status": st.column_config.TextColumn("State"),
    "steps": tables.count("Steps"),
    "step_ms": tables.measured("Step, median (ms)"),
    "data_ms": tables.measured("Data (ms)"),
    "forward_ms": tables.measured("Forward (ms)"),
    "backward_ms": tables.measured("Backward and waiting (ms)"),
    "skipped": tables.count("Skipped"),
    "scale": st.column_config.TextColumn("Loss scale"),
    "peak": st.column_config.TextColumn("Memory peak"),
    "reason": st.column_config.TextColumn("Why it ended", width="large"),
}

APART = {
    "step": tables.count("Step", pinned=True),
    "rank": st.column_config.NumberColumn("Rank"),
    "scale": st.column_config.TextColumn("Loss scale"),
    "skipped": st.column_config.CheckboxColumn("Skipped"),
}


def show(run: Run) -> None:
    """Slow, disagreeing and ended ranks; nothing for a run of one process."""
    if run.head.world_size < 2:
        return
    table = loaders.analysed(rank_table, run)
    st.header(f"{run.head.world_size} ranks", anchor=False)
    timed = table.loc[table["step_ms"].notna(), "rank"].tolist()
    st.markdown(" ".join(part for part in (pace(loaders.analysed(rank_spread, run), timed), scales(run)) if part))
    if len(timed) > 1:
        charts.view(RANKS, run, "ranks.times")
    shown = table.assign(
        scale=[words.scale(value) for value in table["loss_scale"]],
        peak=[words.size(value) if value == value else words.NONE for value in table["memory_peak_bytes"]],
    )
    if not loaders.analysed(scale_summary, run).skips_recorded:
        shown["skipped"] = float("nan")
    alt, columns = "Ranks with their times, skips, memory and ends.", tables.known(shown, COLUMNS)
    tables.show(shown, column_config=columns, column_order=list(columns), height="content", alt=alt)


def agreement(run: Run) -> None:
    """Whether the ranks agree on loss scale and skipped steps, and where not; nothing for one process."""
    if run.head.world_size < 2:
        return
    apart = loaders.analysed(rank_scales, run)
    if apart.empty:
        if sentence := scales(run):
            st.caption(f"{run.head.world_size} ranks. {sentence}")
        return
    st.error(
        f"{scales(run)} Gradients are averaged over ranks while they are multiplied by the scale: from there on they "
        "have the wrong magnitude, and a rank that skips alone trains different weights.",
        icon=":material/error:",
    )
    charts.view(RANK_SCALES, run, "ranks.scales")
    shown = apart.assign(scale=[words.scale(value) for value in apart["loss_scale"]])
    tables.show(shown, column_config=APART, column_order=list(APART), alt="Steps at which ranks disagree.")


def pace(spread: RankSpread | None, timed: list[int]) -> str:
    """The rank that the others wait for, among the ranks whose steps were timed."""
    if spread is None and len(timed) == 1:
        return f"Only rank {timed[0]} was timed: no other rank to compare it with."
    if spread is None:
        return "The ranks' times were not measured."
    if not spread.phases:
        if spread.frac < NOTABLE:
            return "No rank holds up the others: their waits in collectives are short or evenly spread."
        return (
            f"**The others wait for rank {spread.slowest}**, which enters collectives last: "
            f"{words.percent(spread.frac)} of each step. Without waiting its step takes "
            f"{words.number(spread.own_ms, 'ms')}, that of the median rank {words.number(spread.median_ms, 'ms')}."
        )
    where = " and ".join(part for part in (", ".join(spread.phases[:-1]), spread.phases[-1]) if part)
    if spread.frac < NOTABLE:
        return f"No rank holds up the others: all take about as long in {where}, where no rank waits."
    return (
        f"**Rank {spread.slowest} is the slowest**: in {where}, where no rank waits, it takes "
        f"{words.number(spread.own_ms, 'ms')}, the median rank {words.number(spread.median_ms, 'ms')}; "
        f"the others wait for it {words.percent(spread.frac)} of each step."
    )


def scales(run: Run) -> str:
    """Whether the ranks agree on loss scale and skipped steps; empty without a scaler."""
    apart: pd.DataFrame = loaders.analysed(rank_scales, run)
    if len(apart):
        first = apart[apart["step"] == apart["step"].iloc[0]]
        text = "; ".join(
            f"rank {r.rank} {words.scale(r.loss_scale)}{' (skipped)' if r.skipped else ''}"
            for r in tables.rows(first.head(8))
        )
        steps = words.plural(apart["step"].nunique(), "step")
        at = f"{first['step'].iloc[0]:,}"
        return f"**They disagree on the loss scale or on skipping at {steps}**, first at step {at}: {text}."
    return "All agree on loss scale and skips." if run.head.config.get("scaler") else ""
