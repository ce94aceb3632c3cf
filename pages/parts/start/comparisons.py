"""Interleaved comparisons: one job that makes a run for each precision."""

import sys
from collections.abc import Sequence

import streamlit as st

from amp_core import RunError, jobs
from amp_core.cli.settings import flags
from amp_core.settings.combinations import TAKEN_BY
from amp_core.settings.resources import Resources
from amp_core.settings.training import TrainConfig
from pages.parts import picker
from pages.parts.library import run_list

LOCAL = Resources()


def begin(configs: Sequence[TrainConfig], name: str | None, resources: Resources = LOCAL) -> str:
    """Queue `ampscope compare` for the precisions of `configs`, whose other settings are equal; returns the folder's
    name.

    Raises `RunError` for fewer than two precisions, and as `jobs.start` does.
    """
    if len(configs) < 2:
        given = configs[0].precision if configs else None
        raise RunError(f"precision={given!r} alone is no comparison; choose two or more to run interleaved")
    common = next((config for config in configs if config.loss_scale != "dynamic"), configs[0])
    of_some = flags_of_some(configs)
    which = ["--precisions", ",".join(config.precision for config in configs)]
    command = [sys.executable, "-m", "amp_core", "compare", *which, *of_some]
    name = name or f"compare-{common.task}"
    job = jobs.start(common, run_list.runs_dir(), name, command=command, makes="runs", resources=resources)
    return job.name


def flags_of_some(configs: Sequence[TrainConfig]) -> list[str]:
    """The flags of settings that only some precisions take, such as a fixed loss scale: `compare` gives them to
    those."""
    line: list[str] = []
    for name in TAKEN_BY:
        line += next((given for config in configs if (given := flags(config, [name]))), [])
    return line


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
            label="Follow the runs on Compare" if job.alive else "Compare the runs",
            icon=":material/compare_arrows:",
            query_params=picker.compare_address(keys),
        )
