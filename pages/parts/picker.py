"""The run picker in the sidebar, kept in step with `?run=` in the address so that a view can be sent to a colleague."""

import streamlit as st

from pages.parts import library, words
from pages.parts.library import Entry

ORIGINS = {"sample": "sample", "upload": "uploaded"}


def show() -> None:
    """Draw the picker; leaves the library in `st.session_state["entries"]` and the chosen key in `["run"]`."""
    entries = library.listing()
    st.session_state["entries"] = entries
    _follow_address(entries)
    with st.sidebar:
        if entries:
            st.selectbox("Run", list(entries), key="run", format_func=lambda key: label(entries, key))
            st.query_params["run"] = st.session_state["picker.address"] = st.session_state["run"]
        if missing := st.session_state.pop("picker.missing", None):
            st.warning(f"There is no run {words.escape(missing)} here; this is another one.")


def choose(key: str) -> None:
    """Make `key` the chosen run. For callbacks: the picker must not have been drawn yet in this pass."""
    st.session_state["run"] = key


def chosen() -> Entry | None:
    """The entry that the picker is on, None in an empty library."""
    entries: dict[str, Entry] = st.session_state["entries"]
    return entries.get(st.session_state.get("run", ""))


def label(entries: dict[str, Entry], key: str) -> str:
    """What the picker calls a run: its name, its folder where names repeat, and what there is to know at once."""
    entry = entries[key]
    twins = sum(e.name == entry.name for e in entries.values()) > 1
    name = f"{entry.name} ({key.partition('/')[2]})" if twins else entry.name
    said = ORIGINS.get(entry.origin, "") if entry.status == "finished" else entry.status
    return f"{name} · {said}" if said else name


def _follow_address(entries: dict[str, Entry]) -> None:
    """Take over a run from the address when someone put it there: a deep link, or the browser's Back."""
    asked = st.query_params.get("run")
    if asked is not None and asked != st.session_state.get("picker.address"):
        if asked in entries:
            st.session_state["run"] = asked
        else:
            st.session_state["picker.missing"] = asked
    if st.session_state.get("run") not in entries:
        st.session_state["run"] = library.preferred(entries) or next(iter(entries), "")
