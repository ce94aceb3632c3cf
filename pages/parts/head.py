"""The top of a page: its title, and the run it speaks of."""

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from amp_core import Run
from pages.parts import empty, loaders, picker, words
from pages.parts.library.run_list import Entry

# What a run without steps may hold, and the pages that show it.
PROFILED = (
    ("kernels", "pages/tensor_cores.py", "Tensor cores"),
    ("windows", "pages/step_cost.py", "Step cost"),
    ("ops", "pages/precision_map.py", "Precision map"),
)


def title(text: str) -> None:
    """The page's title."""
    st.title(text, anchor=False)


def headline(text: str) -> None:
    """The page's answer, before anything else."""
    st.markdown(f"## {words.unbroken(text)}")


def entry() -> Entry:
    """The chosen entry; ends the page with a sentence where there is none."""
    found = picker.chosen()
    if found is None:
        empty.no_runs()
    assert found is not None
    return found


def run(found: Entry | None = None, table: str = "steps") -> Run:
    """The chosen run, opened, with a line that says which it is; ends the page where there is nothing to read.

    An imported trace may have no steps: a page that can do without them names the table that it reads instead.
    """
    found = found or entry()
    if found.status == "damaged":
        empty.unreadable(found.sentence)
    if not found.readable:
        status_line(found)
        empty.nothing("This run has not begun yet: its process is waiting or loading. Start a run shows the queue.")
    opened = loaders.open_run(found)
    line = status_line(found, opened.status)
    if opened.is_live:
        with line:
            st.space("stretch")
            st.button(
                "Read what is new", icon=":material/refresh:", type="tertiary", help="Overview follows by itself."
            )
    if opened.steps.empty and not opened.table(table).num_rows:
        ending(opened)
        if opened.is_live:
            empty.nothing("This run has recorded no step yet.")
        if any(opened.table(name).num_rows for name, *_ in PROFILED):
            st.info("This run has no steps, which this page is about. A profiler's trace of it is here:")
            profiled(opened)
            st.stop()
        empty.nothing("This run has no steps.", sample=True)
    return opened


def profiled(run: Run) -> None:
    """The pages that show what a profiler saw of the run."""
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


def status_line(found: Entry, status: str | None = None) -> DeltaGenerator:
    """Name, status and what was run, in one line; returned for what else belongs into it."""
    shown_status = status or found.status
    color, icon = words.STATUS_LOOK[shown_status]
    line = st.container(horizontal=True, vertical_alignment="center", gap="small")
    with line:
        st.markdown(f"**{words.escape(found.name)}**", width="content")
        st.badge(shown_status, icon=icon, color=color)
        st.caption(" · ".join(facts(found)), width="content")
    return line


def facts(found: Entry) -> list[str]:
    """Recipe, workload, device and date, as far as the run says."""
    config = found.config or {}
    recipe, device = (str(config.get(name) or "") for name in ("precision", "device"))
    texts = [recipe, words.workload(config), device, day(found.created_at)]
    return [words.escape(text) for text in texts if text]


def day(created_at: str) -> str:
    """The date and time of `created_at` without seconds; as it stands where it is not a time."""
    return created_at[:16].replace("T", " ") + " UTC" if created_at[10:11] == "T" else created_at
