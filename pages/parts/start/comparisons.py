"""A comparison in turns, queued from the app: one job that makes a run for each precision."""

import sys
from collections.abc import Sequence

import streamlit as st

from amp_core import RunError, jobs
from amp_core.settings.training import TrainConfig
from pages.parts import picker
from pages.parts.library import run_list


def begin(configs: Sequence[TrainConfig], name: str | None) -> str:
    """Queue `ampscope compare` for the precisions of `configs`, which agree in all else; gives the folder's name.

    Raises `RunError` for fewer than two of them, and as `jobs.start` does.
    """
    if len(configs) < 2:
        given = configs[0].precision if configs else None
        raise RunError(f"precision={given!r} alone is no comparison; choose two or more to train in turns")
    common = shared(configs)
    command = [sys.executable, "-m", "amp_core", "compare", "--precisions", ",".join(c.precision for c in configs)]
    workload = common.own[1] if common.own is not None else f"{common.workload}-{common.resolved().size}"
    job = jobs.start(common, run_list.runs_dir(), name or f"compare-{workload}", command=command, makes="runs")
    return job.name


def shared(configs: Sequence[TrainConfig]) -> TrainConfig:
    """The settings that those of the precisions have in common."""
    # The comparison takes a fixed loss scale from the one that has it, and leaves it from those without a scaler.
    return next((config for config in configs if config.loss_scale != "dynamic"), configs[0])


def show_latest() -> None:
    """How the comparison stands that this session queued last, and the way to its runs."""
    name = st.session_state.get("start.comparison")
    if name is None:
        return
    entries = st.session_state["entries"]
    keys = picker.reference_first(key for key in entries if key.startswith(f"run/{name}/"))
    try:
        job = jobs.find(run_list.runs_dir() / name)
    except RunError:  # removed meanwhile
        return
    if job.state in ("failed", "lost"):
        st.error(f"The comparison {job.state}: {job.reason}", icon=":material/error:")
    if keys:
        st.page_link(
            "pages/compare_runs.py",
            label="Compare the runs that take turns" if job.alive else "Compare the runs that took turns",
            icon=":material/compare_arrows:",
            query_params=picker.beside(keys),
        )
