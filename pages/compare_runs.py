"""What does one recipe buy against another, and what does it cost?"""

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from amp_core import Finding, Run, RunError, diagnose
from amp_core.analysis import (
    Comparison,
    compare,
    first_runs,
    memory_difference,
)
from amp_core.figures import compare_bars, deviation_figure
from amp_core.views import AGREEMENT, MEMORY_COMPARISON, STEP_COSTS
from pages.parts import address, charts, empty, head, loaders, picker, tables, words
from pages.parts.compare import comparison
from pages.parts.compare import multiple_runs as together
from pages.parts.library.run_list import Entry
from pages.parts.overview import findings, report

MAX_RUNS = 15
ASK = "Choose two runs or more: the first is the baseline for the others."
ALWAYS = ("speed_ratio", "memory_ratio")
# One figure each; those after the first two only if a run recorded the quantity.
BARS = (*ALWAYS, "samples_per_s", "energy_j", "tensor_frac", "eval_loss", "skip_frac")


def pick() -> list[Entry]:
    """The chosen runs, the baseline first; kept in the address."""
    entries: dict[str, Entry] = st.session_state["entries"]
    known = [key for key, entry in entries.items() if entry.readable or entry.under_way]
    if not known:
        empty.no_runs()
    linked = st.query_params.get_all("with")
    asked = [key for key in linked if key in known]
    for key in linked:
        if key not in entries:
            st.warning(f"There is no run {words.escape(key)} here; it is left out.")
        elif entries[key].status == "damaged":
            left_out(entries[key], entries[key].sentence)
    if asked and asked != st.session_state.get("compare.address"):  # from a link or the browser's Back button
        address.set_value("compare.runs", asked[:MAX_RUNS])
    elif "compare.runs" not in st.session_state:
        st.session_state["compare.runs"] = suggested(entries, known)
    address.set_value("compare.runs", [key for key in st.session_state["compare.runs"] if key in known])
    keys = st.multiselect(
        "Runs, the baseline first",
        known,
        st.session_state["compare.runs"],  # see picker.show: what is set alone may never reach the browser
        key="compare.runs",
        format_func=lambda key: picker.label(entries[key]),
        max_selections=MAX_RUNS,
        placeholder="Choose two runs or more",
        persist_state="session",
    )
    st.query_params["with"] = st.session_state["compare.address"] = keys
    return [entries[key] for key in keys]


def suggested(entries: dict[str, Entry], known: list[str]) -> list[str]:
    """The chosen run, and the runs of the same place that train the same workload at the same size, FP32 first. Runs
    under way are included only if the chosen one is under way."""

    def turns(key: str) -> object:
        about = (entries[key].config or {}).get("comparison")
        return about.get("id") if isinstance(about, dict) else None

    def task(key: str) -> tuple[object, ...]:
        config = entries[key].config or {}
        return (entries[key].origin, config.get("workload"), config.get("size"))

    chosen = st.session_state["run"]
    now = chosen in known and entries[chosen].under_way
    fit = [key for key in known if now or not entries[key].under_way]
    keys = [key for key in fit if task(key) == task(chosen)] if chosen in known else fit[:1]
    keys.sort(key=lambda key: ((entries[key].config or {}).get("precision") != "fp32", key != chosen))
    together = [key for key in keys if turns(key) is not None and turns(key) == turns(keys[0])]
    if len(together) > 1:
        return together[:MAX_RUNS]
    return [*keys[:4], chosen] if chosen in keys[5:] else keys[:5]


def opened(entries: list[Entry]) -> list[Run]:
    """The runs that can be read and have steps. Shows a sentence for each of the others."""
    runs = []
    for entry in entries:
        try:
            run = loaders.open_run(entry)
            if run.steps.empty and entry.under_way:
                continue  # its status line shows that
            if run.steps.empty:
                relative = " Step cost sets a trace beside another run." if run.table("windows").num_rows else ""
                st.info(f"{words.escape(entry.name)} has no steps and is left out.{relative}")
            else:
                runs.append(run)
        except RunError as error:
            left_out(entry, error)
    return runs


def left_out(entry: Entry, why: object) -> None:
    """Show the name of a run that cannot be read, and why."""
    st.error(f"{words.escape(entry.name)} is left out: {words.escape(words.sentence(why))}")


def gradients(runs: list[Run]) -> None:
    """How far the gradients of each audited recipe are from their replay in FP32."""
    agreement = AGREEMENT.frame(first_runs(runs), loaders.analysed)
    if not AGREEMENT.absent(agreement):
        charts.show(AGREEMENT.figure(agreement, charts.dark()), "compare.agreement")


def costs(runs: list[Run], compared: Comparison) -> None:
    """Speed, memory, energy and tensor cores per recipe; phases of a step and memory by category."""
    dark = charts.dark()
    table = compared.recipes.assign(run=compared.recipes["recipe"])
    row = st.container(horizontal=True)  # three across beside a scroll bar, two on a narrow page
    for column in BARS:
        if column in ALWAYS or (table[column] > 0).any():
            with row.container(width=286):
                charts.show(compare_bars(table, column, dark=dark), f"compare.{column}")
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
        if len(changes):
            tables.show(difference(changes), hide_index=True, alt="Memory by category against the first recipe.")


def difference(changes: pd.DataFrame) -> pd.DataFrame:
    """Memory by category compared with the first recipe, as text; unchanged categories are omitted."""
    moved = changes[changes["difference_bytes"].abs() > 0]
    rows = [
        {
            "Run": row.run,
            "Part": row.label,
            "Baseline": words.size(row.first_bytes),
            "This run": words.size(row.bytes),
            "Why": row.why,
        }
        for row in moved.itertuples()
    ]
    return pd.DataFrame(rows, columns=["Run", "Part", "Baseline", "This run", "Why"])


def show_relative_findings(runs: list[Run]) -> None:
    """Findings that only a comparison with the baseline shows."""
    first = first_runs(runs)
    for run in first[1:]:
        alone = {(f.code, f.where) for f in loaders.analysed(diagnose, run)}
        relative = loaders.analysed(diagnose_relative, [first[0], run])
        for finding in [f for f in relative if (f.code, f.where) not in alone]:
            st.caption(f"{words.escape(run.name)}, beside {words.escape(first[0].name)}:")
            findings.card(finding)


def diagnose_relative(pair: Sequence[Run]) -> list[Finding]:
    """What the rules find in the second of two runs with the first as its baseline."""
    return diagnose(pair[1], pair[0])


head.title("Compare")
entries = pick()
under_way = any(entry.under_way for entry in entries)
runs = opened([entry for entry in entries if entry.readable])
if under_way:
    together.follow(entries, len(runs))
if len(runs) < 2:
    empty.nothing("The comparison begins when two of them have steps." if under_way else ASK)
if under_way:
    with st.container(horizontal=True, vertical_alignment="center"):
        st.header("So far", anchor=False)
        st.button("Read what is new", icon=":material/refresh:", type="tertiary")

compared = loaders.analysed(compare, runs)
comparison.headline(compared)
comparison.settings(compared)
comparison.tables(compared)
show_relative_findings(runs)
if not under_way:
    together.losses(runs)
if compared.recipes["loss_change_frac"].notna().any():
    charts.show(deviation_figure(compared.recipes, charts.dark()), "compare.deviation")
costs(runs, compared)
gradients(runs)
report.include(runs)
