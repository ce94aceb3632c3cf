"""The largest batch that fits, searched from the app: one job, `ampscope tune --max-batch`, and its answer.

batch.begin(config)        # queue the search
batch.show_latest()        # its state, with a button that puts the answer into the form
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import streamlit as st

from amp_core import RunError, jobs
from amp_core.settings.resources import Resources
from amp_core.settings.training import TrainConfig
from amp_core.tune.max_batch import FILE
from pages.parts import address, callbacks, words
from pages.parts.library import run_list

TRIAL_S = 60
"""Time limit of one trial, in seconds: a person waits for the answer."""
_STARTED = "batch.started"
_PREFIX = "batch-"
"""Prefix of the folders of these searches: other jobs make several runs too."""
_SUMMARY = ("workload", "size", "precision", "device", "answer")
"""Text fields of an answer."""


def begin(config: TrainConfig, resources: Resources) -> str:
    """For callbacks: queue the search for the settings of `config` where `resources` say; returns the folder's name.

    Raises `RunError` as `jobs.start`.
    """
    if config.own is not None:
        raise RunError(f"workload={config.workload!r} makes its own batches; set their size in that file")
    name = f"{_PREFIX}{config.task}-{config.precision}"
    command = [sys.executable, "-m", "amp_core", "tune", "--max-batch", "--timeout", str(TRIAL_S)]
    job = jobs.start(config, run_list.runs_dir(), name, command=command, makes="runs", resources=resources)
    callbacks.put(_STARTED, job.name)
    return job.name


def show_latest() -> None:
    """The result of the search that was queued here last, or that the address names, or why it has none."""
    address.take("search", _STARTED, _folder_name)
    name = st.session_state.get(_STARTED)
    if name is None:
        return
    address.keep("search", _STARTED, name)
    try:
        job = jobs.find(run_list.runs_dir() / name)
    except RunError:  # removed in the meantime
        return
    except OSError as error:
        st.warning(
            f"The search for a batch cannot be read: {words.escape(words.sentence(error.strerror or 'an error'))}"
        )
        return
    if job.alive:
        return  # the queue shows it
    try:
        record = _answer(job.folder)
    except OSError:
        st.warning(f"The search for a batch ended without an answer: {words.escape(_end_sentence(job))}")
        return
    if record is None:
        st.warning(f"What the search for a batch found cannot be read: its {FILE} is damaged.")
        return
    with st.container(horizontal=True, vertical_alignment="center", border=True, key="batch.answer"):
        what = f"{record['workload']} {record['size']} in {record['precision']} on {record['device']}"
        st.markdown(f"**{words.escape(what)}**: {words.escape(words.sentence(record['answer']))}", width="stretch")
        if record["largest_batch"] is not None:
            st.button("Use it", key="batch.use", on_click=_use, args=(record["largest_batch"],))


def _answer(folder: Path) -> dict[str, Any] | None:
    """The result file of a search; None if it is damaged. Raises `OSError` if there is none."""
    try:
        record = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (ValueError, RecursionError):  # not JSON, not UTF-8, or nested too deeply
        return None
    whole = isinstance(record, dict) and all(isinstance(record.get(name), str) for name in _SUMMARY)
    return record if whole and isinstance(record.get("largest_batch", ""), int | None) else None


def _folder_name(text: str) -> str | None:
    """The name of a search's folder, from an address; None for letters that `jobs.start` never uses."""
    plain = re.fullmatch(rf"{_PREFIX}[\w.-]+", text) is not None
    return text if plain and jobs.makes_runs(run_list.runs_dir() / text) else None


@callbacks.uninterrupted
def _use(size: int) -> None:
    callbacks.put("start.batch_size", size)


def _end_sentence(job: jobs.Job) -> str:
    lines = job.console(1)
    return words.sentence(lines[-1] if lines else job.reason or job.state)
