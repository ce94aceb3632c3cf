"""The first minute: three steps through the samples, and the one line that watches the user's own loop."""

import streamlit as st

from pages.parts.library import run_list
from pages.parts.library.run_list import Entry

OVERVIEW, START, LIBRARY = "pages/run_overview.py", "pages/start_run.py", "pages/run_library.py"
STEPS = (
    (
        "1 · What healthy looks like",
        "The loss falls, the loss scale grows until it is too high once, and next to nothing is lost.",
        (("sample/fp16-healthy", "Open the healthy run"),),
    ),
    (
        "2 · What goes wrong",
        "One throws step after step away because gradients overflow; one loses small gradients and says nothing.",
        (("sample/fp16-overflow", "Open the overflow"), ("sample/fp16-underflow", "Open the underflow")),
    ),
)


WIDTH = 250
"""Pixels of a step: three fit side by side, also on a page of 1280 pixels."""


def code() -> str:
    """The one line that watches the user's own loop; its run appears in the library by itself."""
    into = run_list.runs_dir() / "mine"
    return f'from amp_core import watch\nwatch(model, optimizer, scaler=scaler, into="{into.as_posix()}")'


def show(entry: Entry) -> None:
    """The tour, while a sample is shown and until it is dismissed."""
    if entry.origin != "sample" or st.session_state.get("tour.away"):
        return
    entries: dict[str, Entry] = st.session_state["entries"]
    with st.container(border=True, key="tour"):
        with st.container(horizontal=True, vertical_alignment="center"):
            st.markdown("**New here? Three steps**", width="stretch")
            st.button("Put away", key="tour.away.now", type="tertiary", on_click=_put_away)
        steps = st.container(horizontal=True)  # side by side, one under the other on a narrow page
        for title, text, links in STEPS:
            with steps.container(width=WIDTH):
                st.markdown(f"**{title}.** {text}")
                for key, label in links:
                    if key == entry.key:
                        st.markdown(":material/check: You are looking at it.")
                    elif key in entries:
                        st.page_link(OVERVIEW, label=label, icon=":material/arrow_forward:", query_params={"run": key})
        with steps.container(width=WIDTH):
            st.markdown("**3 · Your own.** Train one of the workloads that come along, or add this to your own loop:")
            st.page_link(START, label="Start a run", icon=":material/play_circle:")
        st.code(code(), language="python", wrap_lines=True)


def _put_away() -> None:
    st.session_state["tour.away"] = True
