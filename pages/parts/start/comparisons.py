"""Comparisons in turns: one job that makes a run for each precision."""

import sys
from collections.abc import Sequence

import streamlit as st

from amp_core import RunError, jobs
from amp_core.settings.training import TrainConfig
from pages.parts import picker
from pages.parts.library import run_list


def begin(configs: Sequence[TrainConfig], name: str | None) -> str:
    """Queue `ampscope compare` for the precisions of `configs`, whose other settings are equal; returns the folder's
    name.

    Raises `RunError` for fewer than two precisions, and as `jobs.start` does.
    """
    if len(configs) < 2:
        given = configs[0].precision if configs else None
        raise RunError(f"precision={given!r} alone is no comparison; choose two or more to train in turns")
    common = shared(configs)
    command = [sys.executable, "-m", "amp_core", "compare", "--precisions", ",".join(c.precision for c in configs)]
    job = jobs.start(common, run_list.runs_dir(), name or f"compare-{common.task}", command=command, makes="runs")
    return job.name


def shared(configs: Sequence[TrainConfig]) -> TrainConfig:
    """The settings that the precisions have in common."""
    # The comparison applies a fixed loss scale to the recipes with a scaler only.
    return next((config for config in configs if config.loss_scale != "dynamic"), configs[0])


def show_latest() -> None:
    """The state of the comparison that this session queued last, and a link to its runs."""
    name = st.session_state.get("start.comparison")
    if name is None:
        return
    entries = st.session_state["entries"]
    keys = picker.baseline_first(key for key in entries if key.startswith(f"run/{name}/"))
    try:
        job = jobs.find(run_list.runs_dir() / name)
    except RunError:  # removed in the meantime
        return
    if job.state in ("failed", "lost"):
        st.error(f"The comparison {job.state}: {job.reason}", icon=":material/error:")
    if keys:
        st.page_link(
            "pages/compare_runs.py",
            label="Compare the runs that take turns" if job.alive else "Compare the runs that took turns",
            icon=":material/compare_arrows:",
            query_params=picker.compare_address(keys),
        )
