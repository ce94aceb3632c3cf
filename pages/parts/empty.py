"""What stands where there is nothing to show: one sentence saying why, and what to do about it."""

from typing import NoReturn

import streamlit as st

from pages.parts import picker, words
from pages.parts.overview import tour

START = "pages/start_run.py"
LIBRARY = "pages/run_library.py"
SAMPLE = "sample/fp16-healthy"


def no_runs() -> None:
    """An empty library; ends the page."""
    with st.container(border=True):
        st.header("No runs yet")
        st.write("Start one here, upload a run, or add this to your own training loop: its run appears here by itself.")
        st.code(tour.code(), language="python", wrap_lines=True)
        with st.container(horizontal=True):
            st.page_link(START, label="Start a run", icon=":material/play_circle:")
            st.page_link(LIBRARY, label="Upload a run", icon=":material/upload:")
    st.stop()


def nothing(sentence: str, *, sample: bool = False) -> None:
    """This run has nothing for this page; ends the page. With `sample` a button opens the page on one that has."""
    st.info(sentence, icon=":material/info:")
    if sample and SAMPLE in st.session_state["entries"]:
        label = "See it on a sample run"
        st.button(label, key="empty.sample", icon=":material/visibility:", on_click=picker.choose, args=(SAMPLE,))
    st.stop()


def sentence(error: object) -> NoReturn:
    """Something other than a run cannot be read; ends the page."""
    st.error(words.escape(words.sentence(error)), icon=":material/broken_image:")
    st.stop()


def unreadable(error: object) -> None:
    """A run that cannot be read; ends the page."""
    st.error(f"This run cannot be read: {words.escape(words.sentence(error))}", icon=":material/broken_image:")
    with st.container(horizontal=True):
        st.page_link(LIBRARY, label="Choose another run", icon=":material/folder_open:")
    st.stop()
