"""Empty states: one sentence that says why there is nothing to show, and what to do about it."""

from collections.abc import Sequence
from typing import NoReturn

import streamlit as st

from amp_core import Run
from pages.parts import bar, picker, words
from pages.parts.overview import tour

START = "pages/start_run.py"
LIBRARY = "pages/run_library.py"
SAMPLE = "sample/fp16-healthy"


def no_runs() -> None:
    """Show that the library is empty; ends the page."""
    with st.container(border=True):
        st.header("No runs yet")
        st.write("Start one here, upload a run, or add this to your own training loop: its run appears here by itself.")
        st.code(tour.code(), language="python", wrap_lines=True)
        with st.container(horizontal=True):
            st.page_link(START, label="Start a run", icon=":material/play_circle:")
            st.page_link(LIBRARY, label="Upload a run", icon=":material/upload:")
    st.stop()


def nothing(sentence: str, *, sample: bool = False, run: Run | None = None, tables: Sequence[str] = ()) -> None:
    """Show that this run has no data for this page; ends the page. With `sample`, a button opens it on a run that
    has. If one of `tables` of `run` is damaged, that is why."""
    if run is not None and (damaged := [name for name in tables if run.damaged(name)]):
        noun = "table" if len(damaged) == 1 else "tables"
        sentence = f"What this page shows is in the {noun} {', '.join(damaged)} of this run, which cannot be read."
    st.info(sentence, icon=":material/info:")
    if (steps := bar.narrowed_to()) is not None:
        with st.container(horizontal=True, vertical_alignment="center"):
            st.markdown(f"Only steps {steps[0]:,}–{steps[1]:,} are shown.", width="content")
            st.button("Show all steps", key="empty.steps", on_click=bar.show_all_steps)
    if sample and SAMPLE in st.session_state["entries"]:
        label = "See it on a sample run"
        st.button(label, key="empty.sample", icon=":material/visibility:", on_click=picker.choose, args=(SAMPLE,))
    st.stop()


def sentence(error: object) -> NoReturn:
    """Show an error other than an unreadable run; ends the page."""
    st.error(words.escape(words.sentence(error)), icon=":material/broken_image:")
    st.stop()


def unreadable(error: object) -> None:
    """Show that a run cannot be read; ends the page."""
    st.error(f"This run cannot be read: {words.escape(words.sentence(error))}", icon=":material/broken_image:")
    with st.container(horizontal=True):
        st.page_link(LIBRARY, label="Choose another run", icon=":material/folder_open:")
    st.stop()
