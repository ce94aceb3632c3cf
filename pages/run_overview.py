"""Is this run healthy?"""

from typing import Any

import streamlit as st

from amp_core import Run, diagnose
from amp_core.analysis import Overview, overview, tensor_core_use
from amp_core.findings import first_sentence
from amp_core.hardware.gpus import core_names
from amp_core.views import DEVICE, LOSS, LOSSES, MEMORY, PHASES, View
from pages.parts import baseline, cards, charts, head, live, loaders, warm_up, words
from pages.parts.diagnosed import chain
from pages.parts.hardware import ranks
from pages.parts.library.run_list import Entry
from pages.parts.overview import costs_and_gains, findings, report, tour


def summary(view: Overview) -> str:
    """The number of steps and the loss in one sentence."""
    planned_text = f" of {view.steps_planned:,}" if view.steps_planned else ""
    time = f" in {words.duration(view.duration_s)}" if view.duration_s is not None else ""
    steps = f"{view.steps_done:,}{planned_text} steps{time}"
    known = view.loss_first is not None
    loss = f"; loss {words.loss(view.loss_first)} at first, {words.loss(view.loss_final)} at the end" if known else ""
    skips = f"; {words.plural(view.scale.skips, 'step')} skipped" if view.scale.has_scaler else ""
    return f"{steps}{loss}{skips}."


def of_profile(run: Run) -> None:
    """A run without steps, such as an imported trace: its findings, and the pages of what the profiler recorded."""
    head.ending(run)
    use = loaders.analysed(tensor_core_use, run)
    cores, _ = core_names(use.device_name)
    share = "" if use.tensor_frac is None else f", {words.percent(use.tensor_frac)} of it on {cores}"
    work = "Traced operators. " if len(run.ops) else ""
    if use.kernel_us:
        work = f"{words.number(use.kernel_us / 1000, 'ms')} of kernels{share}. "
    diagnosed = loaders.analysed(diagnose, run)
    planned = run.head.config.get("steps")
    missing = planned if isinstance(planned, int) and planned > 0 and run.status == "finished" else 0
    if missing:
        st.warning(f"{words.plural(missing, 'step')} were planned and none is here: the run's folder is not complete.")
    headline = loaders.analysed(first_sentence, run) or (work and f"{work}No training steps were recorded.")
    findings.banner(diagnosed, headline, ended_well=not missing, run=run)
    head.profiled(run)
    findings.causes(diagnosed, run)
    findings.remarks(diagnosed, run)


def of_training(run: Run, entry: Entry) -> None:
    """A training run: its findings, costs and gains, and its charts."""
    view = loaders.analysed(overview, run)
    head.ending(run)
    ended_well = view.status not in ("failed", "lost")
    diagnosed = loaders.analysed(diagnose, run)
    headline = loaders.analysed(first_sentence, run) or summary(view)
    findings.banner(diagnosed, headline, ended_well=ended_well, run=run)
    tour.show(entry)
    left, right = charts.grid("overview.answer")
    with left:
        costs_and_gains.show(run, view, chain(run))
        if view.loss_first is None:  # an imported trace has steps but no loss
            head.profiled(run)
    with right:
        loss(run, view)
    findings.causes(diagnosed, run)
    cards.show(run, view)
    over_steps: dict[View[Any], Any] = {shown: shown.frame(run, loaders.analysed) for shown in (PHASES, MEMORY, DEVICE)}
    if view.loss_first is None:  # shown above
        del over_steps[PHASES]
    drawn = [shown for shown, frame in over_steps.items() if not shown.absent(frame)]
    for first in range(0, len(drawn), 2):
        for place, shown in zip(charts.grid(f"overview.{first}"), drawn[first : first + 2], strict=False):
            with place:
                charts.show(shown.figure(over_steps[shown], charts.dark()), f"overview.{shown.name}", half=True)
    ranks.show(run)
    findings.remarks(diagnosed, run)
    report.include([run])
    warm_up.analyse_other_pages(run)
    warm_up.load_widgets()


def loss(run: Run, view: Overview) -> None:
    """The loss, beside that of the baseline and its noise band."""
    bases = baseline.repeats()
    if view.loss_first is None:
        charts.view(PHASES, run, "overview.phases.first", half=True)
    elif bases and not bases[0].steps["loss"].isna().all():
        charts.view(LOSSES, [*bases, run], "overview.loss", half=True)
    else:
        charts.view(LOSS, run, "overview.loss", half=True)


@st.fragment
def details(run: Run) -> None:
    """The run's head, on demand: the browser loads and draws a tree for each part."""
    box = st.expander("Configuration and environment", key="overview.details", on_change="rerun")
    if not box.open:
        return
    with box:
        for title, facts in (
            ("Configuration", run.head.config),
            ("Results", run.head.results),
            ("Model", run.head.model),
            ("Environment", run.head.environment),
        ):
            if facts:
                st.caption(title)
                st.json(dict(facts), expanded=1)


head.title("Overview")
entry = head.entry()
if entry.under_way:
    live.show(entry)
    st.stop()
run = head.run(entry, "windows", overview=True)
if run.steps.empty:
    of_profile(run)
else:
    of_training(run, entry)
details(run)
