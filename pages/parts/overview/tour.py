"""The first minute: what AMPscope is, the samples to look at, and the one line that watches the user's own loop."""

import streamlit as st

from pages.parts import words
from pages.parts.library import run_list
from pages.parts.library.run_list import Entry

OVERVIEW, START, LIBRARY = "pages/run_overview.py", "pages/start_run.py", "pages/run_library.py"
WHAT = (
    "**AMPscope** shows whether PyTorch training in mixed precision is healthy, what it loses, what it gains over "
    "FP32, and what to change."
)
STEPS = (
    ("sample/fp16-healthy", "Open fp16-healthy"),
    ("sample/fp16-overflow", "Open fp16-overflow"),
    ("sample/fp16-underflow", "Open fp16-underflow"),
)
ABOUT = (
    "fp16-healthy lets the loss scale grow until it overflows once; fp16-overflow keeps skipping steps; fp16-underflow "
    "silently underflows."
)
COOKIE, DISMISSED = "ampscope_tour", "dismissed"
YEAR_S = 365 * 24 * 3600


def code() -> str:
    """The one line that watches the user's own loop; its run appears in the library by itself."""
    into = run_list.runs_dir() / "mine"
    return f'from amp_core import watch\nwatch(model, optimizer, scaler=scaler, into="{into.as_posix()}")'


def show(entry: Entry) -> None:
    """The tour, while a sample is shown and until it is dismissed in this browser."""
    if st.session_state.get("tour.away"):
        _remember()
        return
    if entry.origin != "sample" or st.context.cookies.get(COOKIE) == DISMISSED:
        return
    entries: dict[str, Entry] = st.session_state["entries"]
    with st.container(border=True, key="tour", gap="small"):
        st.markdown(f"{WHAT} New here? The sample **{words.escape(entry.name)}** is open. Three steps:")
        with st.container(horizontal=True, vertical_alignment="center"):
            for key, label in STEPS:
                if key == entry.key:
                    st.markdown(f":material/check: {words.escape(entry.name)} is open", width="content")
                elif key in entries:
                    query = {"run": key}
                    st.page_link(OVERVIEW, label=label, icon=":material/arrow_forward:", query_params=query)
            st.page_link(START, label="Start a run", icon=":material/play_circle:")
            with st.popover("Watch my own loop", icon=":material/code:"):
                st.code(code(), language="python", wrap_lines=True)
            st.space("stretch")
            st.button("Dismiss", key="tour.away.now", type="tertiary", on_click=_dismiss)
        st.caption(ABOUT)


def _dismiss() -> None:
    st.session_state["tour.away"] = True


def _remember() -> None:
    """Let the browser keep that the tour was dismissed: a reload begins a new session."""
    cookie = f"{COOKIE}={DISMISSED}; max-age={YEAR_S}; path=/; SameSite=Lax"
    st.html(f"<script>document.cookie = '{cookie}'</script>", unsafe_allow_javascript=True)
