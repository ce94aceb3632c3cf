"""The top of a page: its title and its run."""

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from amp_core import Run
from amp_core.analysis.steps import emulated, recipe
from amp_core.settings.catalog import EMULATED
from pages.parts import bar, baseline, empty, loaders, picker, words
from pages.parts.diagnosed import chain
from pages.parts.library.run_list import Entry
from pages.parts.overview import findings

# Tables that a run without steps may have, and the pages that show them.
PROFILED = (
    ("kernels", "pages/tensor_cores.py", "Tensor cores"),
    ("windows", "pages/step_cost.py", "Step cost"),
    ("ops", "pages/precision_map.py", "Precision map"),
    ("memory", "pages/memory_use.py", "Memory"),
)


def title(text: str) -> None:
    """The page's title."""
    st.title(text, anchor=False)


def headline(text: str) -> None:
    """The page's answer, before anything else."""
    st.markdown(f"## {words.unbroken(text)}")


def entry() -> Entry:
    """The chosen entry; ends the page with a sentence if there is none."""
    chosen = picker.chosen()
    if chosen is None:
        empty.no_runs()
    assert chosen is not None
    return chosen


def run(chosen: Entry | None = None, table: str = "steps", *, overview: bool = False) -> Run:
    """The chosen run, opened, with its status line; ends the page if there is nothing to read.

    An imported trace may have no steps: a page that can do without them names the table that it reads instead. Every
    page but Overview, which shows it in full, begins with the diagnosis.
    """
    chosen = chosen or entry()
    if chosen.status == "damaged":
        empty.unreadable(chosen.sentence)
    if not chosen.readable:
        status_line(chosen)
        empty.nothing("This run has not begun yet: its process is waiting or loading. Start a run shows the queue.")
    opened = loaders.open_run(chosen)
    line = status_line(chosen, opened.status)
    if emulated(opened):
        st.caption(f"{words.escape(str(recipe(opened)).upper())} is {EMULATED}.")
    if opened.is_live:
        with line:
            st.space("stretch")
            st.button(
                "Read what is new", icon=":material/refresh:", type="tertiary", help="Overview follows by itself."
            )
    traced = any(opened.table(name).num_rows for name, *_ in PROFILED)
    absent = opened.steps.empty and not opened.table(table).num_rows
    # A fault may be why there are no steps: Overview shows it with its code, other pages in short.
    if absent and not (overview and (traced or chain(opened).cause is not None)):
        ending(opened)
        if opened.is_live:
            empty.nothing("This run has recorded no step yet.")
        if traced:
            findings.trail(opened)
            st.info("This page needs training steps, and this run has none. It has a profiler trace:")
            profiled(opened)
            st.stop()
        findings.trail(opened)
        empty.nothing("This run has no steps.", sample=True, run=opened, tables=(table,))
    shown = bar.in_range(opened)
    if not overview:
        findings.trail(shown)
    baseline.differences(shown)
    return shown


def profiled(run: Run) -> None:
    """Links to the pages that show what a profiler recorded of the run."""
    with st.container(horizontal=True):
        for table, file, label in PROFILED:
            if run.table(table).num_rows:
                st.page_link(file, label=label, icon=":material/query_stats:")


def ending(opened: Run) -> None:
    """Why a run that did not finish ended, with the last lines of its output."""
    if opened.status in ("failed", "lost", "stopped") and opened.end_reason:
        say = st.warning if opened.status == "stopped" else st.error
        reason = words.escape(words.sentence(opened.end_reason))
        status = opened.status.capitalize()
        repeats_status = reason.lower().startswith(f"{opened.status} ")  # "stopped by SIGTERM", "stopped on request"
        say(f"{status}{reason[len(status) :]}" if repeats_status else f"{status}: {reason}")
    if opened.status in ("failed", "lost") and (lines := opened.console(20)):
        with st.expander("Last lines of its output", expanded=True):
            st.code("\n".join(lines), language=None, wrap_lines=True)


def status_line(chosen: Entry, status: str | None = None) -> DeltaGenerator:
    """Name, status and configuration of a run in one line; returned so that the caller can add to it."""
    shown_status = status or chosen.status
    color, icon = words.STATUS_LOOK[shown_status]
    line = st.container(horizontal=True, vertical_alignment="center", gap="small")
    with line:
        st.markdown(f"**{words.escape(chosen.name)}**", width="content")
        st.badge(shown_status, icon=icon, color=color)
        st.caption(" · ".join(facts(chosen)), width="content")
    return line


def facts(chosen: Entry) -> list[str]:
    """Recipe, workload, device and date, as far as recorded."""
    config = chosen.config or {}
    recipe, device = (str(config.get(name) or "") for name in ("precision", "device"))
    texts = [recipe, words.workload(config), device, day(chosen.created_at)]
    return [words.escape(text) for text in texts if text]


def day(created_at: str) -> str:
    """The date and time of `created_at` without seconds; unchanged if it is not a time."""
    return created_at[:16].replace("T", " ") + " UTC" if created_at[10:11] == "T" else created_at
