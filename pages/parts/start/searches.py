"""Searches for a recipe (`ampscope tune`): the list, the result of one, and the form that starts one."""

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st

from amp_core import RunError, jobs
from amp_core.library.permissions import current
from amp_core.settings.training import TrainConfig
from amp_core.tune.codegen import FRAMEWORKS, LABELS, code_for
from amp_core.tune.result import FILE, STAGES, Tried, Tuned, load_tuned
from pages.parts import callbacks, tables, words
from pages.parts.library import run_list
from pages.parts.start import devices, places, queue, workloads

COLUMNS = {
    "name": st.column_config.TextColumn("Recipe", pinned=True),
    "speed": st.column_config.TextColumn("Speed", help="How many times as fast, with its interval"),
    "memory": st.column_config.TextColumn("Memory", help="Peak, of the baseline's"),
    "learns": st.column_config.TextColumn("Parity", help="Final loss within the seed-to-seed noise of FP32"),
    "out": st.column_config.TextColumn("Ruled out because", width="large"),
    "note": st.column_config.TextColumn("Derived from"),
    "steps": tables.count("Steps"),
    "trainings": tables.count("Trainings"),
}
SAMPLE = " · sample"
"""Ends the names of samples in the list of searches."""
BUDGET_HELP = (
    "Time limit of the search in seconds. Runs are shortened to fit; if that is not enough, the answer names a "
    "sufficient budget."
)
STEPS_HELP = "Steps of each training in the parity test; fewer if the budget requires it."


def listing() -> dict[str, Path]:
    """Folders of searches by name: the user's own, newest first, then the samples."""
    try:
        folders = [file.parent for file in run_list.runs_dir().glob(f"*/{FILE}")]
        folders.sort(key=lambda folder: (folder / FILE).stat().st_mtime, reverse=True)
    except OSError:  # removed after it was listed
        return {}
    samples = sorted(file.parent for file in run_list.SAMPLES.glob(f"*/{FILE}"))
    return {folder.name: folder for folder in folders} | {f"{one.name}{SAMPLE}": one for one in samples}


def is_sample(name: str) -> bool:
    """Whether the search of that name came with AMPscope."""
    return name.endswith(SAMPLE)


def choose(searches: Mapping[str, Path]) -> Path:
    """A field for the search to show; kept in the address."""
    asked = st.query_params.get("search")
    names = list(searches)
    if asked in names and asked != st.session_state.get("tune.address"):
        st.session_state["tune.search"] = asked
    elif st.session_state.get("tune.search") not in names:
        st.session_state["tune.search"] = names[0]
    name = st.selectbox("Search", names, key="tune.search")
    st.query_params["search"] = st.session_state["tune.address"] = name
    return searches[name]


def status(folder: Path, tuned: Tuned) -> str:
    """The state of a search; a killed search could not record its end."""
    job = queue.job_of(folder)
    return job.state if tuned.status == "running" and job is not None else tuned.present_status


def follow(folder: Path) -> None:
    """The progress of a search under way, refreshed every other second; the page runs again when it has ended."""

    @st.fragment(run_every=2.0)
    def part() -> None:
        tuned = load_tuned(folder)
        state = status(folder, tuned)
        if state not in ("queued", "starting", "running"):
            st.rerun()
        job = queue.job_of(folder)
        with st.container(horizontal=True, vertical_alignment="center"):
            share = min(1.0, tuned.seconds / tuned.budget_s)
            took = f"{words.duration(tuned.seconds)} when the last stage ended, budget {words.duration(tuned.budget_s)}"
            st.progress(share, text=took)
            if job is not None:
                queue.stop_button(job, "tune")
        lines = job.console(8) if job is not None else []
        if lines:
            st.code("\n".join(lines), language=None, wrap_lines=True)
        evidence(tuned)

    part()


def evidence(tuned: Tuned) -> None:
    """The trials by stage, and what was left out."""
    for stage, title in STAGES.items():
        rows = [row for row in tuned.tried if row.stage == stage]
        if rows:
            st.header(f"{title[0].upper()}{title[1:]}", anchor=False)
            frame = pd.DataFrame([_shown(row) for row in rows])
            tables.show(frame, column_config=COLUMNS, alt=f"Search: {title}.")
    if tuned.left_out:
        st.header("Not tried", anchor=False)
        st.markdown("\n".join(f"- **{words.escape(what)}**: {words.escape(why)}" for what, why in tuned.left_out))


def code(tuned: Tuned) -> None:
    """The code for the recipe, one tab per framework."""
    st.header("Code", anchor=False)
    for tab, framework in zip(st.tabs([LABELS[name] for name in FRAMEWORKS]), FRAMEWORKS, strict=True):
        with tab:
            text = code_for(tuned.config, framework, tuned.answer)
            file = f"train_{framework}.py"
            st.download_button(f"Download {file}", text, file, icon=":material/download:", on_click="ignore")
            with st.expander(f"Show {file}"):  # whole: a scrolling block of code cannot be reached with the keyboard
                st.code(text, language="python")


def _shown(row: Tried) -> dict[str, Any]:
    speed = words.ratio(row.speed_ratio, row.speed_ratio_low, row.speed_ratio_high)
    return {
        "name": row.name,
        "speed": "baseline" if row.speed_verdict == "reference" else speed,
        "memory": f"{words.number(row.memory_ratio)} ×",
        "learns": row.parity or words.NONE,
        "out": "no parity" if row.out and row.out == row.parity else row.out or words.NONE,
        "note": row.note,
        "steps": row.steps,
        "trainings": len(row.runs),
    }


def form() -> None:
    """The form that queues a search, with the sentence of a refusal."""
    with st.form("tune.form", border=False):
        with st.container(horizontal=True, vertical_alignment="bottom"):
            offered = workloads.ALL, 0, workloads.label
            st.selectbox("Workload and size", *offered, help=workloads.HELP, width=400, key="tune.what")
            if current().scripts:
                st.text_input("Or your own", placeholder="FILE.py:FUNCTION", width=260, key="tune.own")
            tuned, _ = devices.available()
            labels = dict(tuned)
            st.selectbox("Device", list(labels), format_func=labels.__getitem__, width=170, key="tune.device")
            st.number_input("Budget (seconds)", 10, value=300, step=60, width=150, help=BUDGET_HELP, key="tune.budget")
            st.number_input("Steps of a training", 20, value=200, step=20, width=175, help=STEPS_HELP, key="tune.steps")
        refused = st.session_state.get("tune.refused")
        places.show("tune", refused)
        if refused and refused[0] not in places.FIELDS:
            st.error(words.escape(refused[1]))
        st.form_submit_button("Search", key="tune.go", on_click=begin, type="primary", icon=":material/search:")


@callbacks.uninterrupted
def begin() -> None:
    """Callback of the form: queue the search, or keep the refusal."""
    state = callbacks.do(st.session_state.to_dict)
    callbacks.put("tune.refused", None)
    own = str(state.get("tune.own") or "").strip() if current().scripts else ""
    workload, size = state["tune.what"] if not own else (str(Path(current().scripts[0]) / own), None)
    try:
        config = TrainConfig(
            workload=workload, size=size, precision="fp32", steps=state["tune.steps"], device=state["tune.device"]
        )
        command = [sys.executable, "-m", "amp_core", "tune", "--budget", str(state["tune.budget"])]
        where = places.resources({name: state.get(f"tune.{name}") for name in places.FIELDS})
        if where.on != "local":
            config = dataclasses.replace(config, device="auto")
        name = f"tune-{config.task}"
        job = jobs.start(config, run_list.runs_dir(), name, command=command, makes="runs", resources=where)
    except RunError as error:
        callbacks.put("tune.refused", (str(error).partition("=")[0], words.sentence(error)))
    else:
        callbacks.put("tune.started", job.name)
