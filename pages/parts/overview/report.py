"""The report of what a page shows, as a file to keep.

report.include([run])  # on a page
report.offer()         # once, below every page: a button if the page included runs
"""

import re
from collections.abc import Sequence
from html import escape

import streamlit as st

from amp_core import Run, RunError
from amp_core.report import report_html

_RUNS = "report.runs"


def include(runs: Sequence[Run]) -> None:
    """Include these runs in the report of the page."""
    st.session_state[_RUNS] = list(runs)


def offer() -> None:
    """A button that makes the report when it is pressed."""
    runs: list[Run] = st.session_state.pop(_RUNS, [])
    if runs:
        st.download_button(
            "Report",
            lambda: _made(runs),
            file_name=f"{file_name(runs)}.html",
            mime="text/html",
            on_click="ignore",
            icon=":material/download:",
            help="One HTML file with verdict, findings, charts and settings: opens without a network, and prints.",
            key="report",
        )


def file_name(runs: Sequence[Run]) -> str:
    """Names of the runs, restricted to characters that every file system accepts."""
    return "-".join(["report", *(re.sub(r"[^A-Za-z0-9._-]+", "_", run.name)[:40] for run in runs)])[:120]


def _made(runs: Sequence[Run]) -> bytes:
    try:
        return report_html(runs).encode()
    except RunError as error:  # the download runs outside the page, which cannot show the error
        return f"<!doctype html><title>No report</title><p>{escape(str(error))}</p>".encode()
