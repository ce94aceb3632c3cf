"""Several runs side by side: their losses over each other and, while some of them train, how far each is.

    together.follow(entries)       # a live fragment, while one of them is under way
    together.losses(runs)          # the curves alone

Like `live` it stands in the page's body, and the whole page is run again once when a run begins or ends. While it is
paused it keeps showing the runs as they were, so that a zoom stays whatever else is pressed.
"""

from collections.abc import Sequence
from pathlib import Path

import streamlit as st

from amp_core import Run, RunError
from amp_core.analysis import overview
from amp_core.views import LOSSES
from pages.parts import charts, live, loaders, words
from pages.parts.library.run_list import Entry
from pages.parts.start import queue

X_LABELS = {"step": "Step", "samples": "Samples", "time_s": "Time"}
POINTS = 2000
"""Points of a curve; `live.POINTS` while the run grows."""


def losses(runs: Sequence[Run], points: int = POINTS) -> None:
    """Loss curves over the noise band, with skipped steps and phases marked, over steps, samples or time."""
    with st.container(horizontal=True, vertical_alignment="center"):
        x = st.segmented_control(
            "Loss by", list(X_LABELS), default="step", required=True, format_func=X_LABELS.__getitem__, key="compare.x"
        )
        log = st.toggle("Log loss axis", key="compare.log")
    curves = LOSSES.frame(runs, loaders.analysed, x=x, points=points)
    charts.show(LOSSES.figure(curves, charts.dark(), log=log), "compare.loss")


def follow(entries: Sequence[Entry], begun: int) -> None:
    """A line with a Stop button for each run, and the curves of those that have steps, refreshed once a second.

    `begun` is the number of runs that had steps when the page ran: two can be compared.
    """
    paused = st.toggle("Pause", key="compare.pause", help="Freezes the curves for zooming. The runs continue.")
    st.fragment(_panel, run_every=None if paused else live.TICK_S)(entries, begun, paused)


def _panel(entries: Sequence[Entry], begun: int, paused: bool) -> None:
    held: dict[str, Run] = st.session_state.setdefault("compare.held", {})
    runs: dict[str, Run] = {}
    for entry in entries:
        try:
            known = held.get(entry.key)
            ended = known is not None and known.head.status == entry.status != "running"  # its end was read
            run = _status_line(entry, known if paused or ended else None)
        except RunError as error:
            st.error(f"{words.escape(entry.name)}: {words.escape(words.sentence(error))}")
            continue
        if run is not None:
            runs[entry.key] = run
    st.session_state["compare.held"] = runs
    _turns(entries)
    drawn = [run for run in runs.values() if not run.steps.empty]
    if not paused and begun < 2 <= len(drawn):
        st.rerun()
    if drawn:
        losses(drawn, live.POINTS)


def _turns(entries: Sequence[Entry]) -> None:
    """A line with a Stop button for each interleaved comparison: one process trains all its runs."""
    folders = dict.fromkeys(e.path.parent for e in entries if e.under_way and isinstance(e.path, Path))
    for folder in folders:
        job = queue.job_of(folder)
        if job is not None and job.makes_runs:
            with st.container(horizontal=True, vertical_alignment="center", key=f"turns.{job.name}"):
                st.caption(f"{words.escape(job.name)} trains them interleaved.", width="content")
                queue.stop_button(job, "turns")


def _status_line(entry: Entry, held: Run | None) -> Run | None:
    """Draw the status line of one run. Returns the run, or None while it waits for its process."""
    job = queue.job_of(entry.path) if entry.under_way else None
    with st.container(horizontal=True, vertical_alignment="center", key=f"together.{entry.key}"):
        run = None
        if entry.readable:
            run = held if held is not None else loaders.open_run(entry)
            if held is not None:
                loaders.pin(held)
            if entry.under_way and held is None and not run.is_live:
                st.rerun()  # once: the next listing shows it as ended
            live.progress(loaders.analysed(overview, run), entry.name)
        else:
            if job is None or job.state != entry.status:
                st.rerun()
            st.progress(0.0, text=f"**{words.escape(entry.name)}** · {queue.waiting_for(job)}")
        if job is not None:
            queue.stop_button(job, "together")
    return run
