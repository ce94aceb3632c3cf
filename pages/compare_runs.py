"""What does one recipe buy against another, and what does it cost?"""

import streamlit as st

from amp_core.analysis import compare
from amp_core.analysis.performance.kernels import is_trace
from amp_core.figures import deviation_figure, run_colours
from pages.parts import charts, empty, head, loaders, tabs
from pages.parts.compare import choice, comparison, costs, kernels, second_run
from pages.parts.compare import multiple_runs as together
from pages.parts.overview import report

ASK = "Choose two runs or more: the first is the baseline."

head.title("Compare")
entries = choice.pick()
under_way = any(entry.under_way for entry in entries)
runs = choice.opened([entry for entry in entries if entry.readable])
if under_way:
    together.follow(entries, len(runs))
if len(runs) < 2:
    if len(entries) < 2:
        second_run.offer(entries)
    empty.nothing("The comparison starts once two of them have steps." if under_way else ASK)
if under_way:
    with st.container(horizontal=True, vertical_alignment="center"):
        st.header("So far", anchor=False)
        st.button("Read what is new", icon=":material/refresh:", type="tertiary")

costs.diagnoses(runs)
if all(is_trace(run) for run in runs):
    kernels.traces(runs)
    report.include(runs)
    st.stop()
compared = loaders.analysed(compare, runs)
comparison.headline(compared)
hues = run_colours(compared.table, charts.dark())


def result() -> None:
    """The ratios of each recipe, and its loss beside the baseline's."""
    if not under_way:
        together.losses(runs)
    if compared.recipes["loss_change_frac"].notna().any():
        charts.show(deviation_figure(compared.recipes, charts.dark(), hues=hues), "compare.deviation")
    comparison.tables(compared)
    costs.relative_findings(runs)


def numerics() -> None:
    """Gradients, updates and outputs beside those of the baseline."""
    costs.gradients(runs, hues)
    costs.lost_updates(runs)
    if not under_way:
        costs.first_differences(runs)
    costs.forward_audits(runs)


subjects = {
    "Result": result,
    "Speed and memory": lambda: costs.show(runs, compared, hues),
    "Numerics": numerics,
}
if kernels.profiled(runs):
    subjects["Operators and kernels"] = lambda: kernels.changes(runs)
subjects["Settings"] = lambda: comparison.settings(compared)
tabs.show(subjects)
report.include(runs)
