"""What the recipes of a comparison cost and buy: speed, memory, gradients, and findings beside the baseline."""

from collections.abc import Mapping, Sequence

import streamlit as st

from amp_core import Finding, Run, RunError, diagnose
from amp_core.analysis import (
    Comparison,
    FirstDifference,
    first_difference,
    first_runs,
    forward_differences,
    memory_difference,
    unique_labels,
    update_summary,
)
from amp_core.figures import compare_bars
from amp_core.views import AGREEMENT, MEMORY_COMPARISON, STEP_COSTS
from pages.parts import charts, loaders, tables, words
from pages.parts.hardware import memory as memory_tables
from pages.parts.overview import findings

ALWAYS = ("speed_ratio", "memory_ratio")
# One figure each; those after the first two only if a run recorded the quantity.
BARS = (*ALWAYS, "samples_per_s", "energy_j", "tensor_frac", "eval_loss", "skip_frac")


def show(runs: list[Run], compared: Comparison, hues: Mapping[str, str]) -> None:
    """Speed, memory, energy and tensor cores per recipe; phases of a step and memory by category."""
    dark = charts.dark()
    table = compared.recipes.assign(run=compared.recipes["recipe"])
    row = st.container(horizontal=True)  # three across beside a scroll bar, two on a narrow page
    for column in BARS:
        if column in ALWAYS or (table[column] > 0).any():
            with row.container(width=286):
                charts.show(compare_bars(table, column, dark=dark, hues=hues), f"compare.{column}")
    first = first_runs(runs)
    if len(first) < len(runs):
        st.caption("Time of a step and memory are those of the first run of each recipe.")
    steps = STEP_COSTS.frame(first, loaders.analysed)
    if not STEP_COSTS.absent(steps):
        charts.show(STEP_COSTS.figure(steps, dark), "compare.steps")
        if steps["source"].iloc[0] == "profile":
            st.caption("Of profiled steps: the profiler makes them longer than those in the table.")
    memory = MEMORY_COMPARISON.frame(first, loaders.analysed)
    if not MEMORY_COMPARISON.absent(memory):
        charts.show(MEMORY_COMPARISON.figure(memory, dark), "compare.memory")
        changes = loaders.analysed(memory_difference, first)
        changes = memory_tables.changes(changes[changes["difference_bytes"].abs() > 0])
        if len(changes):
            alt = "Memory by category against the first recipe."
            with st.expander("Changes in memory by category"):
                tables.show(changes, column_config=memory_tables.CHANGES, alt=alt)


def gradients(runs: list[Run], hues: Mapping[str, str]) -> None:
    """How far the gradients of each audited recipe are from their replay in FP32."""
    agreement = AGREEMENT.frame(first_runs(runs), loaders.analysed)
    if not AGREEMENT.absent(agreement):
        charts.show(AGREEMENT.figure(agreement, charts.dark(), hues=hues), "compare.agreement")


UPDATES = {
    "run": st.column_config.TextColumn("Run", pinned=True),
    "dtype": st.column_config.TextColumn("Weights"),
    "lost_mass_frac": tables.share("Lost updates", help_="Of the mass of the updates; mean over all weights"),
    "unchanged_frac": tables.share("Unchanged", help_="Of the elements that have an update"),
    "lost_decay_frac": tables.share("Lost decay", help_="Of weight decay, lr · λ"),
    "still": tables.count("Mostly lost", help_="Tensors that lose at least half of their updates"),
    "tensors": tables.count("Compared tensors", help_="FP32 weights are compared where `updates=True` asks for it"),
    "cure": st.column_config.TextColumn("Remedy", help="What prevents rounding from losing updates"),
}


def lost_updates(runs: list[Run]) -> None:
    """What is lost to rounding in the updates of each run, if the update ledger of any was recorded."""
    updates = loaders.analysed(update_summary, runs)
    if updates["tensors"].any():
        st.header("Updates lost to rounding", anchor=False)
        columns = tables.known(updates, UPDATES)
        tables.show(updates, column_config=columns, column_order=list(columns), alt="Lost updates of each run.")


PARTED = {
    "step": tables.count("First at step", pinned=True, width=110),
    "phase": st.column_config.TextColumn("Phase", width=90),
    "name": st.column_config.TextColumn("Tensor"),
    "kind": st.column_config.TextColumn("Kind", width=100),
    "difference": tables.measured("Difference", help_="Relative difference of RMS or mean magnitude"),
    "floor": tables.measured("Noise floor", help_="The same between the first run and its perturbed repeat"),
    "largest_difference": tables.measured("Largest difference"),
}
NO_FLOOR = "none: any difference counts"


def first_differences(runs: list[Run]) -> None:
    """Where the second run parts from the first; any further run can give the noise floor."""
    first, second, *others = runs
    st.header("First divergence", anchor=False)
    floor = None
    if others:
        names = dict(zip(unique_labels(runs)[2:], others, strict=True))
        help_ = "A repeat of the first run with a perturbation as small as rounding"
        floor = names.get(st.selectbox("Noise floor from", [NO_FLOOR, *names], key="compare.floor", help=help_))
    try:
        where = loaders.analysed(_first_difference, [first, second, *([] if floor is None else [floor])])
    except RunError as error:
        st.caption(words.escape(words.sentence(error)))
        return
    st.markdown(words.escape(where.sentence))
    st.caption(words.escape(where.compared))
    shown = where.table.dropna(subset="step")
    if len(shown):
        columns = tables.known(shown, PARTED)
        alt = "First difference of each tensor between the first two runs."
        tables.show(shown, column_config=columns, column_order=list(columns), alt=alt)


FORWARD = {
    "run": st.column_config.TextColumn("Run", pinned=True),
    "name": st.column_config.TextColumn("Module"),
    "rel_error": tables.measured("Relative error", help_="Norm of the difference from FP32 over the norm in FP32"),
    "cosine": st.column_config.NumberColumn("Cosine", format="%.6f"),
    "nonfinite": tables.count("Non-finite"),
    "step": tables.count("Step"),
}


def forward_audits(runs: list[Run]) -> None:
    """How far each module's output is from FP32, of runs with `rec.audit(…, forward=True)`."""
    differences = loaders.analysed(forward_differences, runs)
    if len(differences):
        st.header("Outputs of each module against FP32", anchor=False)
        tables.show(differences, column_config=FORWARD, column_order=list(FORWARD), alt="Outputs against FP32.")


def _first_difference(runs: Sequence[Run]) -> FirstDifference:
    return first_difference(*runs)


def diagnoses(runs: list[Run]) -> None:
    """The diagnosis of each run that has a fault, as its own pages show it."""
    for run in runs:
        findings.trail(run, named=True)


def relative_findings(runs: list[Run]) -> None:
    """Findings that only a comparison with the baseline shows."""
    first = first_runs(runs)
    for run in first[1:]:
        alone = {(f.code, f.where) for f in loaders.analysed(diagnose, run)}
        relative = loaders.analysed(_diagnose_relative, [first[0], run])
        for finding in [f for f in relative if (f.code, f.where) not in alone]:
            st.caption(f"{words.escape(run.name)} against {words.escape(first[0].name)}:")
            findings.card(finding)


def _diagnose_relative(pair: Sequence[Run]) -> list[Finding]:
    """What the rules find in the second of two runs with the first as its baseline."""
    return diagnose(pair[1], pair[0])
