"""Is this run healthy?"""

import streamlit as st

from amp_core import Run, diagnose
from amp_core.analysis import (
    Overview,
    device_samples,
    loss_curves,
    memory_trace,
    overview,
    phase_times,
    step_marks,
    thin,
)
from amp_core.figures import device_figure, loss_figure, memory_figure, phase_figure
from amp_core.figures.marks import with_marks
from pages.parts import cards, charts, findings, glance, head, live, loaders, ranks, report, tour, words


def summary(view: Overview) -> str:
    """How far it came and what became of the loss, in a sentence."""
    of = f" of {view.steps_planned:,}" if view.steps_planned else ""
    time = f" in {words.duration(view.duration_s)}" if view.duration_s is not None else ""
    steps = f"{view.steps_done:,}{of} steps{time}"
    known = view.loss_first is not None
    loss = f"; loss {words.loss(view.loss_first)} at first, {words.loss(view.loss_last)} at the end" if known else ""
    skips = f"; {words.plural(view.scale.skips, 'step')} skipped" if view.scale.has_scaler else ""
    return f"{steps}{loss}{skips}."


def ending(run: Run, view: Overview) -> None:
    """Why a run that did not finish ended, with the last lines of its output."""
    if view.status in ("failed", "lost", "stopped") and view.end_reason:
        say = st.warning if view.status == "stopped" else st.error
        say(f"{view.status.capitalize()}: {words.escape(words.sentence(view.end_reason))}")
    if view.status in ("failed", "lost") and (lines := run.console(20)):
        with st.expander("Last lines of its output", expanded=True):
            st.code("\n".join(lines), language=None)


def details(run: Run) -> None:
    """Everything that the run's head says."""
    with st.expander("Configuration and environment"):
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
run = head.run(entry)
view = loaders.analysed(overview, run)
ending(run, view)
ended_well = view.status not in ("failed", "lost")
found = loaders.analysed(diagnose, run)
findings.banner(found, summary(view), ended_well=ended_well, run=run)
tour.show(entry)
glance.show(run, view, findings.to_tell(found, run))
findings.causes(found, run)
cards.show(run, view)
findings.remarks(found, run)
dark = charts.dark()
marks = loaders.analysed(step_marks, run)
if view.loss_first is not None:
    loss = loss_figure(loaders.analysed(loss_curves, [run], "step", most=4000), dark=dark)
    charts.show(with_marks(loss, marks, dark=dark), "overview.loss")
left, right = st.columns([3, 2])
with left:
    phases = phase_figure(loaders.analysed(phase_times, run), dark=dark)
    charts.show(with_marks(phases, marks, dark=dark), "overview.phases")
with right:
    memory = thin(loaders.analysed(memory_trace, run), "step", "allocated_bytes")
    if len(memory):
        held = memory_figure(memory, dark=dark, what=view.memory.what)
        charts.show(with_marks(held, marks, dark=dark), "overview.memory")
samples = loaders.analysed(device_samples, run)
if len(samples):
    charts.show(device_figure(thin(samples, "time_s", "gpu_util_frac"), dark=dark), "overview.device")
ranks.show(run)
details(run)
report.button([run], "overview")
