"""What is lost to rounding in updates: the answer, its numbers, the tables, and what helps."""

import pandas as pd
import streamlit as st

from amp_core import Run
from amp_core.analysis import not_recorded_reasons, update_changes
from amp_core.analysis.numerics.update_losses import MIN_LOST_FRAC
from amp_core.figures import difference_figure
from amp_core.formats import element_bytes
from pages.parts import baseline, charts, loaders, tables, words
from pages.parts import cards as card_parts

COLUMNS = {"lost_mass_frac": "lost updates", "unchanged_frac": "unchanged elements", "lost_decay_frac": "lost decay"}
TITLES = {
    "lost_mass_frac": "Updates lost to rounding",
    "unchanged_frac": "Elements that an update left unchanged",
    "lost_decay_frac": "Weight decay lost to rounding",
}
HOW = (
    "`watch(…, updates=True)` compares the updates of all weights, FP32 ones too, with the same step in float64. "
    "`ampscope train … --updates` does so for a training started here."
)
TABLE = {
    "name": st.column_config.TextColumn("Tensor", pinned=True, width=190),
    "lost_mass_frac": tables.share("Lost", help_="Of the mass of its updates; median of the compared steps"),
    "still_since": tables.count(
        "Since step", help_="From this step on, half of its updates or more are lost", width=90
    ),
    "unchanged_frac": tables.share("Unchanged", help_="Of the elements that have an update"),
    "lost_decay_frac": tables.share("Decay lost", help_="Of weight decay, lr · λ"),
    "update_ratio": st.column_config.NumberColumn(
        "Update / weight", format="%.2g", width=110, help="Root mean squares. BF16 rounds off below about 2⁻⁹ = 0.002."
    ),
    "cure": st.column_config.TextColumn("Cure", help="What keeps rounding from losing updates"),
    "dtype": st.column_config.TextColumn("dtype", width=75),
    "steps": tables.count("Steps", help_="Steps that were compared", width=70),
    "numel": tables.count("Elements", width=90),
}
AVERAGES = {
    "name": st.column_config.TextColumn("Average of", pinned=True, width=190),
    "unchanged_frac": tables.share("Unchanged", help_="Of the elements that differ from their weight"),
    "lost_mass_frac": tables.share("Lost", help_="Of what the average should have moved"),
    "decay": st.column_config.NumberColumn("Decay", format="%.5g", width=80, help="Estimated from what moved"),
    "dtype": st.column_config.TextColumn("dtype", width=75),
    "steps": tables.count("Steps", help_="Steps that were compared", width=70),
}
CURES = {
    "FP32 masters": (
        "Weights stay in FP32; autocast casts them for each GEMM. Costs 2 bytes per parameter more than 16-bit "
        "weights, and loses almost nothing.",
        "model.float()\nwith torch.autocast(device_type, dtype=torch.bfloat16):\n    loss = loss_fn(model(x), y)",
    ),
    "Kahan summation": (
        "A second 16-bit tensor keeps what rounding lost of each update, and adds it to the next one.",
        "from optimi import AdamW\n\noptimizer = AdamW(model.parameters(), lr=lr, kahan_sum=True)",
    ),
    "Stochastic rounding": (
        "Each weight is rounded up or down at random, with probabilities that make the update right on average. "
        "Needs no extra memory.",
        "from torchao.optim import _AdamW\n\noptimizer = _AdamW(model.parameters(), lr=lr, bf16_stochastic_round=True)",
    ),
}
"""What each cure does, and its code."""


def why_none(run: Run) -> str:
    """Why the run has no row of the update ledger, and how to record one."""
    reasons = [r.removeprefix("updates: ") for r in not_recorded_reasons(run) if r.startswith("updates: ")]
    if reasons:
        how = "" if run.head.config.get("updates") else f" {HOW}"
        return f"No update was compared: {words.escape(words.sentence(reasons[-1]))}{how}"
    unasked = run.events.loc[run.events["name"] == "updates", "detail"]
    if len(unasked):
        return f"No update was compared: {words.escape(words.sentence(unasked.iloc[-1]))}"
    by_dtype = run.head.model.get("tensors_by_dtype") or {}
    if by_dtype and not any((element_bytes(dtype) or 4) < 4 for dtype in by_dtype):
        return f"This run keeps its weights in FP32, where rounding loses almost none of an update. {HOW}"
    if "updates" not in run.head.config:
        return f"This run has no update ledger: another program wrote it, or an older AMPscope. {HOW}"
    return f"No step of this run was compared: it ended before a sampled step of its optimizer. {HOW}"


def headline(summary: "pd.Series", averages: pd.DataFrame) -> str:
    """The page's answer."""
    still_averages = averages[averages["unchanged_frac"] >= MIN_LOST_FRAC]
    about_averages = (
        f" {len(still_averages):,} of {words.plural(len(averages), 'average')} of weights no longer change."
        if len(still_averages)
        else ""
    )
    if not summary["tensors"]:
        return f"The weights were not compared.{about_averages or ' Their averages follow them.'}"
    lost = words.percent(summary["lost_mass_frac"])
    of = words.plural(summary["tensors"], "tensor")
    if summary["still"]:
        since = "the first compared step" if summary["still_since"] == 0 else f"step {summary['still_since']:,}"
        text = (
            f"Rounding loses {lost} of the updates: {summary['still']:,} of {of} no longer change, the first of them "
            f"since {since}."
        )
    elif summary["cure"]:
        text = f"{words.escape(summary['cure'])}: rounding loses {lost} of the updates of {of}."
        text = text[0].upper() + text[1:]
    else:
        text = f"Rounding loses {lost} of the updates of {of}, and never more than half of those of one tensor."
    return text + about_averages


def cards(summary: "pd.Series", averages: pd.DataFrame) -> None:
    """The numbers at the top."""
    left, right = card_parts.pairs()
    dtype = words.escape(summary["dtype"])
    with left:
        card_parts.card(
            "Lost updates",
            words.percent(summary["lost_mass_frac"]),
            f"{dtype} weights",
            help_="Σ |change − update| over Σ |update|, the update from the step in float64; mean over all weights.",
        )
        card_parts.card(
            "Unchanged elements",
            words.percent(summary["unchanged_frac"]),
            "of those with an update",
        )
    with right:
        card_parts.card(
            "Lost weight decay",
            words.percent(summary["lost_decay_frac"]),
            "of lr · λ" if summary["lost_decay_frac"] == summary["lost_decay_frac"] else "no weight decay",
        )
        if len(averages):
            still = int((averages["unchanged_frac"] >= MIN_LOST_FRAC).sum())
            card_parts.card("Unchanged averages", f"{still:,}", f"of {len(averages):,}")


def against_baseline(run: Run, column: str) -> None:
    """By how much each tensor's share in `column` differs from the baseline's, with its noise; nothing without a
    baseline."""
    bases = baseline.repeats()
    if not bases:
        return
    base = bases[0].name
    if bases[0].updates.empty:
        st.caption(f"{words.escape(base)} has no update ledger, so updates cannot be compared with it. {HOW}")
        return
    changes = loaders.analysed(update_changes, [*(b for b in bases if len(b.updates)), run], column)
    st.markdown(baseline.changes_in_words(changes, base, "tensor", COLUMNS[column], words.percent))
    axis = f"difference in {COLUMNS[column]} (percentage points)"
    title = f"Difference in {COLUMNS[column]}"
    charts.show(difference_figure(changes, base, axis, charts.dark(), title, percent=True), "updates.change")


def table(losses: pd.DataFrame) -> None:
    """Each tensor's losses in numbers."""
    columns = tables.known(losses, TABLE)
    tables.show(losses, column_config=columns, column_order=list(columns), alt="What each tensor's updates lose.")


def averages_table(averages: pd.DataFrame) -> None:
    """The averaged copies of the weights, if the run has 16-bit ones."""
    if len(averages):
        st.header("Averaged copies of the weights", anchor=False)
        columns = tables.known(averages, AVERAGES)
        alt = "What averaged copies of the weights lose."
        tables.show(averages, column_config=columns, column_order=list(columns), alt=alt)


def cures() -> None:
    """What keeps rounding from losing updates, with the code."""
    st.header("What helps", anchor=False)
    for tab, (about, code) in zip(st.tabs(list(CURES)), CURES.values(), strict=True):
        with tab:
            st.markdown(about)
            st.code(code, language="python")
