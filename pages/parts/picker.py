"""The run picker in the sidebar, kept in step with `?run=` in the address so that a view can be sent to a colleague."""

from collections.abc import Iterable

import streamlit as st

from pages.parts import address, words
from pages.parts.library import run_list
from pages.parts.library.run_list import Entry


def show() -> None:
    """Draw the picker; leaves the library in `st.session_state["entries"]` and the chosen key in `["run"]`."""
    entries = run_list.listing()
    st.session_state["entries"] = entries
    _follow_address(entries)
    with st.sidebar:
        if entries:
            keys = list(entries)
            # What is set in one pass never reaches a browser that has the next one before it drew the first: then it
            # shows, and later sends, what the field has by itself.
            at_first = keys.index(st.session_state["run"])
            st.selectbox("Run", keys, at_first, lambda key: label(entries[key]), key="run", on_change=_turned)
            st.query_params["run"] = st.session_state["picker.address"] = st.session_state["run"]


def tell(page: str) -> None:
    """Above the page: the run that was asked for is not there, or not any more, and another one is shown. It is said
    on that page until somebody chooses a run."""
    missing, instead, where = st.session_state.get("picker.missing", ("", "", None))
    if not missing:
        return
    if instead != st.session_state.get("run", "") or where not in (None, page):
        del st.session_state["picker.missing"]
        return
    st.session_state["picker.missing"] = (missing, instead, page)
    shown = chosen()
    other = f" What follows is another run, {words.escape(label(shown))}." if shown is not None else ""
    st.warning(f"There is no run {words.escape(missing)} here.{other}", icon=":material/link_off:")


def _turned() -> None:
    st.session_state["picker.turn"] = st.session_state.get("picker.turn", 0) + 1


def let_go(key: str) -> None:
    """The run of that key was deleted here: that another one is shown needs no word."""
    st.session_state["picker.let_go"] = key


def choose(key: str) -> None:
    """Make `key` the chosen run. For callbacks: the picker must not have been drawn yet in this pass."""
    st.session_state["run"] = key


def chosen() -> Entry | None:
    """The entry that the picker is on, None in an empty library."""
    entries: dict[str, Entry] = st.session_state["entries"]
    return entries.get(st.session_state.get("run", ""))


def label(entry: Entry) -> str:
    """What the picker calls a run: unique, and the same as long as it is there.

    The browser knows a choice by its label alone, so nothing that changes, such as the status, may be in it. What tells
    samples apart stands first: the sidebar has room for some 23 letters.
    """
    if entry.origin != "sample":
        return placed(entry)
    if entry.group and entry.name == entry.path.name:
        return f"{entry.name} · sample of {entry.group}"
    return f"{placed(entry)} · sample"


def placed(entry: Entry) -> str:
    """The run's place in the library, with its name before it where that is another."""
    place = entry.key if entry.origin == "elsewhere" else entry.key.partition("/")[2]
    return place if entry.name == entry.path.name else f"{entry.name} ({place})"


def reference_first(keys: Iterable[str]) -> list[str]:
    """The keys of runs with those that are FP32 by their name before the others, which are held against them."""
    return sorted(keys, key=lambda key: "fp32" not in key.rpartition("/")[2])


def beside(keys: list[str]) -> dict[str, str | list[str]]:
    """The address of Compare with these runs. All of it: what the page itself adds would be one more step for Back."""
    return {"run": st.session_state["run"], "with": keys}


def _follow_address(entries: dict[str, Entry]) -> None:
    """Take over a run from the address when someone put it there: a deep link, or the browser's Back."""
    asked, missing = st.query_params.get("run"), None
    if asked and asked != st.session_state.get("picker.address"):
        if asked in entries:
            address.set_value("run", asked)
        else:
            missing = asked
    # A pass that was under way when the run was renamed sends its old label, which is no choice any more: it stays.
    before = (st.session_state.get("run"), st.session_state.get("picker.address"))
    kept = next((key for key in before if key in entries), None)
    if kept is None and before[1] and before[1] != st.session_state.get("picker.let_go"):
        missing = missing or before[1]
    shown = kept or run_list.preferred(entries) or next(iter(entries), "")
    address.set_value("run", shown)
    if missing:
        st.session_state["picker.missing"] = (missing, shown, None)
