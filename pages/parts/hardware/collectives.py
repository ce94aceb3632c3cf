"""Collectives of a profiled window: what they carry, how fast, and who is waited for."""

import streamlit as st

from amp_core import Run
from amp_core.analysis.performance.collectives import collective_table, gradient_dtype
from amp_core.analysis.performance.rank_waiting import rank_waiting, waited_for
from pages.parts import loaders, tables, words

COLUMNS = {
    "name": st.column_config.TextColumn("Collective", pinned=True),
    "phase": st.column_config.TextColumn("Phase"),
    "dtype": st.column_config.TextColumn("Type"),
    "group": st.column_config.TextColumn("Group"),
    "count": tables.measured("Per step"),
    "message": st.column_config.TextColumn("Message"),
    "ms": tables.measured("Time (ms)"),
    "alone_ms": tables.measured("Alone (ms)", help_="With no other kernel on the device."),
    "waiting_ms": tables.measured(
        "Waiting (ms)", help_="Until the last rank enters; known with the traces of all ranks."
    ),
    "transfer_ms": tables.measured("Transfer (ms)"),
    "gb_per_s": tables.measured(
        "GB/s", help_="Algorithm bandwidth: message over transfer; over all of the time where waiting is not known."
    ),
}
RANKS = {
    "rank": st.column_config.NumberColumn("Rank", pinned=True),
    "ms": tables.measured("In collectives (ms)"),
    "waiting_ms": tables.measured("Waiting (ms)"),
    "transfer_ms": tables.measured("Transfer (ms)"),
    "stalled_ms": tables.measured("Stalled (ms)", help_="Beyond the transfer, after all ranks have entered."),
    "last_frac": tables.percent("Enters last"),
    "kept_ms": tables.measured("Others wait for it (ms)"),
}


def show(run: Run) -> None:
    """The collectives, and the ranks that wait; nothing for a run without any."""
    table = loaders.analysed(collective_table, run)
    if table.empty:
        return
    st.header("Collectives", anchor=False)
    st.markdown(sentence(run))
    shown = table.assign(
        message=[words.size(value) if value == value else words.NONE for value in table["message_bytes"]]
    )
    shown = shown.replace("", words.NONE)
    columns = tables.known(shown, COLUMNS)
    tables.show(shown, column_config=columns, column_order=list(columns), alt="Collectives by kind, type and phase.")
    ranks = loaders.analysed(rank_waiting, run)
    if len(ranks):
        tables.show(ranks, column_config=RANKS, column_order=list(RANKS), alt="Waiting in collectives by rank.")


MAX_LATE_NAMED = 4
"""Of more ranks that the others wait for, the number is told."""


def sentence(run: Run) -> str:
    """How much of the time is waiting and for whom, and the type in which gradients are reduced."""
    waited, dtype = loaders.analysed(waited_for, run), loaders.analysed(gradient_dtype, run)
    if waited is None:
        text = "Traces of all ranks are needed to separate transfer from waiting for other ranks."
    else:
        named = waited.late[:MAX_LATE_NAMED]
        ranks = ", ".join(f"**rank {rank}**" for rank, _ in named)
        shares = ", ".join(words.percent(frac) for _, frac in named)
        enter = "enters" if len(waited.late) == 1 else "enter"
        unnamed = len(waited.late) - len(named)
        more = f" It waits at least half as long for {unnamed} more." if unnamed else ""
        text = (
            f"A rank waits {words.number(waited.all_waiting_ms, 'ms')} of each step in collectives, most for {ranks}, "
            f"which {enter} {shares} of them last.{more}"
        )
        known = len(loaders.analysed(rank_waiting, run))
        if known < run.head.world_size:
            text += f" Only {known} of {run.head.world_size} ranks are known, so this is a lower bound."
    return f"{text} Gradients are reduced in {dtype}." if dtype else text
