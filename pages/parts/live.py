"""The one live fragment: a run under way, refreshed once a second until it ends.

    live.show(entry, with_queue=True)

It stands in the page's body, never inside another fragment. Only new rows are read. When the run ends, or a queued one
begins, the whole page runs again once, to update everything outside the fragment.
"""

from typing import Any

import plotly.graph_objects as go
import streamlit as st

from amp_core import Run, RunError
from amp_core.analysis import Overview, kinds_present, overview, sampled_steps, scale_summary, slow_first_step
from amp_core.views import GRAD_NORM, LOSS, LOSS_SCALE, MEMORY, RANGES, View
from amp_core.views.tensors import shown_kind
from pages.parts import cards, charts, head, loaders, release_memory, words
from pages.parts.hardware import gauges
from pages.parts.library import run_list
from pages.parts.library.run_list import Entry
from pages.parts.overview import findings
from pages.parts.start import queue

TICK_S = 1.0
FIRST_STEP = (
    "It takes longest: kernels are loaded, chosen or compiled, and memory is allocated for the first time. "
    "Speeds leave it out."
)
POINTS = 800
"""Points of a live chart: it is sent again each second."""


def show(entry: Entry | None, *, with_queue: bool = False) -> None:
    """The status line of a run with Pause and Stop, then the live part; without a run, only the queue.

    It does not tick while paused, nor when nothing more will come.
    """
    under_way = entry is not None and entry.under_way
    if entry is not None:
        line = head.status_line(entry)
        if under_way:
            job = queue.job_of(entry.path)
            with line:
                st.space("stretch")
                st.toggle("Pause", key="live.pause", help="Freezes the charts so that you can zoom. The run continues.")
                if job is not None:
                    if job.backend != "local":
                        st.caption(queue.place(job), width="content")
                    queue.stop_button(job, "live")
    paused = under_way and bool(st.session_state.get("live.pause"))
    more_to_come = under_way or (with_queue and bool(queue.alive()))
    ticking = more_to_come and not paused
    st.fragment(_panel, run_every=TICK_S if ticking else None)(entry, with_queue, ticking, paused)
    if entry is not None and paused:
        st.fragment(_rerun_at_end, run_every=TICK_S)(entry.key)


def _rerun_at_end(key: str) -> None:
    """While paused: the status line and buttons are valid only until the run ends."""
    now = run_list.listing().get(key)
    if now is None or not now.under_way:
        st.rerun()


def _panel(entry: Entry | None, with_queue: bool, ticking: bool, paused: bool) -> None:
    waiting = queue.alive() if with_queue else []
    if ticking and not waiting and not (entry and entry.under_way):
        st.rerun()  # nothing will change any more: stop ticking
    try:
        run = _numbers(entry, paused) if entry is not None else None
        queue.show(waiting, entry.path if entry is not None else None)
        if run is not None:
            _charts(run)
            cards.show(run, loaders.analysed(overview, run))
            gauges.show(run)
    except RunError as error:
        st.error(words.escape(words.sentence(error)), icon=":material/broken_image:")
    release_memory.collect_soon()


def _numbers(entry: Entry, paused: bool) -> Run | None:
    """Progress and findings. Returns the run if it has steps to draw; while paused an unchanged one, which keeps the
    zoom."""
    if entry.status in ("queued", "starting"):
        _waiting(entry)
        return None
    held_of, held = st.session_state.get("live.held", ("", None))
    run: Run = held if paused and held_of == entry.key else loaders.open_run(entry)
    st.session_state["live.held"] = entry.key, run
    if paused:
        loaders.pin(run)
    if entry.under_way and not run.is_live:
        st.rerun()  # once: the next listing shows it as ended
    view = loaders.analysed(overview, run)
    progress(view)
    if not view.steps_done:
        if run.is_live:
            st.caption(f"The first step is under way. {FIRST_STEP}")
        head.ending(run)
        return None
    findings.live(run)
    return run


def _waiting(entry: Entry) -> None:
    job = queue.job_of(entry.path)
    if job is None or job.state != entry.status:
        st.rerun()
    assert job is not None
    reason = queue.waiting_for(job)
    st.info(f"{reason[0].upper()}{reason[1:]}.", icon=words.STATUS_LOOK[job.state][1])


def progress(view: Overview, name: str | None = None) -> None:
    """How far a run is; with `name`, for a list of several runs, also its speed, loss and skipped steps."""
    planned = f" of {view.steps_planned:,}" if view.steps_planned else ""
    parts = [f"step {view.steps_done:,}{planned}"]
    if name is not None:
        parts = [f"**{words.escape(name)}**", view.status, *parts]
    if view.speed.step_ms:
        parts.append(words.number(1000 / view.speed.step_ms, "steps/s"))
    if view.eta_s is not None:
        parts.append(f"{words.about(view.eta_s)} left")
    if name is not None and view.loss_last is not None:
        parts.append(f"loss {words.loss(view.loss_last)}")
    if name is not None and view.scale.has_scaler:
        parts.append(f"{words.share_of(view.scale.skips, view.scale.attempts)} skipped")
    if view.progress_frac is not None:
        st.progress(view.progress_frac, text=" · ".join(parts))
    else:
        st.caption(" · ".join(parts))


def _charts(run: Run) -> None:
    drawn = loaders.analysed(_figures, run, charts.dark())  # once for all sessions that show it
    left, right = charts.grid("live.first")
    with left:
        charts.show(drawn["loss"], "live.loss", half=True)
    with right:
        beside = "scale" if "scale" in drawn else "norm"
        charts.show(drawn[beside], f"live.{beside}", half=True)
    if (slow := loaders.analysed(slow_first_step, run)) is not None:
        st.caption(f"Step {slow.step:,} took {words.about(slow.step_ms / 1e3)}: {FIRST_STEP}")
    left, right = charts.grid("live.second")
    with left:
        if "ranges" in drawn:
            charts.show(drawn["ranges"], "live.ranges", half=True)
        else:
            st.caption("No number ranges yet: none of the steps so far was sampled.")
    with right:
        charts.show(drawn["memory"], "live.memory", half=True)


def _figures(run: Run, dark: bool) -> dict[str, go.Figure]:
    """The figures by subject."""

    def drawn(view: View[Any], **options: Any) -> go.Figure:
        return view.draw(run, dark, loaders.analysed, points=POINTS, **options)

    figures = {"loss": drawn(LOSS), "memory": drawn(MEMORY)}
    if loaders.analysed(scale_summary, run).has_scaler:
        figures["scale"] = drawn(LOSS_SCALE, band=False)  # the cost of a tick must not grow with the run
    else:
        figures["norm"] = drawn(GRAD_NORM)
    if kinds_present(run):
        kind = shown_kind(run, loaders.analysed)
        step = sampled_steps(run, kind)[-1]
        title = f"{{kind}} at step {step:,}"
        frame = RANGES.frame(run, loaders.analysed, kind=kind, step=step, title=title)
        figures["ranges"] = RANGES.figure(frame, dark, clickable=False)
    return figures
