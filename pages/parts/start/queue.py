"""The visible queue: trainings that run or wait, on which device, behind which job; each with its Stop button."""

from collections.abc import Sequence
from pathlib import Path

import streamlit as st

from amp_core import RunError, jobs
from amp_core.jobs import Job
from amp_core.library.permissions import current
from amp_core.store.urls import Address
from pages.parts import callbacks, picker, words
from pages.parts.library import run_list

MAX_SHOWN = 20
"""Jobs that the queue shows: each has buttons, which a browser draws again at each tick."""


def job_of(folder: Path | Address) -> Job | None:
    """The job behind a run folder; None if no job started the run."""
    if isinstance(folder, Address):
        return None
    try:
        return jobs.find(folder)
    except RunError:
        return None


def alive() -> list[Job]:
    """Jobs that run or wait, in the order in which they will run."""
    return sorted(
        jobs.under_way(run_list.runs_dir()), key=lambda job: (job.device, job.queue_position or 0, job.created_ns)
    )


def waiting_for(job: Job) -> str:
    """Why a job has not started its run yet."""
    if job.state == "queued":
        place = f"number {job.queue_position} in the queue, " if job.queue_position is not None else ""
        return place + words.escape(job.reason)
    if job.backend != "local" and job.node is not None:
        return f"starting on {words.escape(job.node)}: loading PyTorch, the data and the model"
    return "starting: loading PyTorch, the data and the model"


def stop_button(job: Job, where: str) -> None:
    """A button that stops `job`, and says so while the job finishes its step; beside it, why it could not be stopped. A
    read-only server has none."""
    if current().read_only:
        return
    st.button(
        "Stopping" if job.stop_requested else "Stop",
        key=f"{where}.stop.{run_list.name_of(job)}",
        icon=":material/stop:",
        on_click=_stop,
        args=(job,),
        disabled=job.stop_requested or not job.alive,
    )
    folder, refusal = st.session_state.get("queue.refused", (None, ""))
    if folder == job.folder:
        st.error(words.escape(refusal))


@callbacks.uninterrupted
def _stop(job: Job) -> None:
    """Request the stop. A callback cannot draw, so a refusal is kept for the button."""
    callbacks.put("queue.refused", (None, ""))
    try:
        job.request_stop()
    except RunError as error:
        callbacks.put("queue.refused", (job.folder, words.sentence(error)))


def place(job: Job) -> str:
    """Where a job waits or runs: its place in the queue and why it waits, or its node."""
    first = f"number {job.queue_position} for {job.device}" if job.queue_position else job.device
    parts = [first] if job.backend == "local" else [f"{first}, job {job.backend_id or 'not confirmed'}"]
    if job.node is not None:
        parts.append(f"on {job.node}")
    if job.backend != "local" and job.reason:
        parts.append(job.reason)
    return words.escape(" · ".join(parts))


def show(running: Sequence[Job], watched: Path | Address | None) -> None:
    """One line per job but the watched one, whose Stop is elsewhere; call it inside the live fragment. Runs that wait
    or train together have a link to a page that follows them."""
    root = run_list.runs_dir().resolve()
    under_way = [f"run/{run_list.name_of(job, root)}" for job in running if not job.makes_runs]
    started: list[str] = st.session_state.get("start.followed", [])
    if set(started) & set(under_way):  # runs started together stay together, even when ended
        under_way = list(dict.fromkeys([*(key for key in started if key in st.session_state["entries"]), *under_way]))
    compare_link(under_way[:MAX_SHOWN])
    shown = running[:MAX_SHOWN]
    for job in shown:
        if isinstance(watched, Path) and job.folder == watched.absolute():
            continue
        color, icon = words.STATUS_LOOK[job.state]
        name = run_list.name_of(job, root)
        with st.container(horizontal=True, vertical_alignment="center", border=True, key=f"queue.{name}"):
            st.badge(job.state, icon=icon, color=color)
            st.markdown(f"**{words.escape(name)}**", width="content")
            st.caption(place(job), width="content")
            st.space("stretch")
            key = f"run/{name}"
            if job.makes_runs:  # no run itself: the runs below it are in the library
                if lines := job.console(1):
                    st.caption(words.escape(lines[-1].strip()), width="content")
                compare_link([f"{key}/{run.parent.name}" for run in job.folder.glob("*/run.json")])
                stop_button(job, "queue")
                continue
            with st.container(horizontal=True, width="content"):  # on a narrow page both wrap
                if st.button("Watch", key=f"queue.watch.{name}", on_click=picker.choose, args=(key,)):
                    st.rerun()  # leaves the fragment: the whole page shows that run
                stop_button(job, "queue")

    if len(running) > len(shown):
        st.caption(f"{len(running) - len(shown):,} more jobs wait.")


def compare_link(keys: Sequence[str]) -> None:
    """A link to Compare, which follows these runs side by side; nothing for fewer than two."""
    if len(keys) > 1:
        st.page_link(
            "pages/compare_runs.py",
            label=f"Follow these {len(keys)} side by side",
            icon=":material/compare_arrows:",
            query_params=picker.compare_address(picker.baseline_first(keys)),
        )
