"""The run picker of the bar, kept in step with `?run=` in the address so that a view can be sent to a colleague."""

import time
from collections.abc import Iterable

import streamlit as st

from pages.parts import callbacks, words
from pages.parts.library import run_list
from pages.parts.library.run_list import Entry

FIELD = "picker.field"
"""The number of the field, the run that it shows, and that of the field before it. Where a run is chosen otherwise than
by the field, it is replaced: what the browser still sends of the one before, as on a busy machine, counts for nothing.
"""
RENEWED = "picker.renewed"
"""Whether the next pass draws a new field, whatever it shows: its run may have another name."""
STALE = "picker.stale"
"""The address before a callback chose a run, and when the new one was first drawn, None before."""
STALE_S = 10.0
"""For so long a busy browser may send the address before, with each message that it wrote until it showed the new one;
only afterwards is that address the Back button's.
"""


def listed() -> dict[str, Entry]:
    """The library, also in `st.session_state["entries"]`; takes over the run that the address asks for."""
    entries = run_list.listing()
    st.session_state["entries"] = entries
    _follow_address(entries)
    return entries


def show(entries: dict[str, Entry]) -> None:
    """Draw the picker: sets the chosen key in `st.session_state["run"]`."""
    keys, run = list(entries), st.session_state["run"]
    number, shown, _ = st.session_state.setdefault(FIELD, (0, run, None))
    if st.session_state.pop(RENEWED, False) or shown != run:
        number += 1
        st.session_state[FIELD] = (number, run, shown)
    key = f"picker.{number}"
    st.selectbox("Run", keys, keys.index(run), lambda key: label(entries[key]), key=key, on_change=_picked, args=(key,))
    st.query_params["run"] = st.session_state["picker.address"] = run
    stale, since = st.session_state.get(STALE, (None, 0.0))
    if since is None:
        st.session_state[STALE] = (stale, time.monotonic())


def show_missing(page: str) -> None:
    """Above the page: the requested run does not exist (any more), and another one is shown. The notice stays on that
    page until a run is chosen."""
    missing, instead, where = st.session_state.get("picker.missing", ("", "", None))
    if not missing:
        return
    if instead != st.session_state.get("run", "") or where not in (None, page):
        del st.session_state["picker.missing"]
        return
    st.session_state["picker.missing"] = (missing, instead, page)
    shown = chosen()
    other = f"; what follows is another run, {words.escape(label(shown))}" if shown is not None else ""
    st.warning(f"There is no run {words.escape(missing)} here{other}.", icon=":material/link_off:")


@callbacks.uninterrupted
def _picked(field: str) -> None:
    run = callbacks.do(st.session_state.__getitem__, field)
    number, _, replaced = callbacks.do(st.session_state.__getitem__, FIELD)
    if field == f"picker.{number}":
        callbacks.put(FIELD, (number, run, replaced))
    elif run == replaced:
        return
    callbacks.put("run", run)
    callbacks.put("picker.turn", callbacks.get("picker.turn", 0) + 1)


@callbacks.uninterrupted
def mark_deleted(key: str) -> None:
    """Note that this run was deleted here: showing another one then needs no notice."""
    callbacks.put("picker.let_go", key)


@callbacks.uninterrupted
def choose(key: str) -> None:
    """For callbacks: make `key` the chosen run, under its present name."""
    callbacks.put(RENEWED, True)
    callbacks.put(STALE, (callbacks.get("picker.address"), None))
    callbacks.put("run", key)


def chosen() -> Entry | None:
    """The chosen entry; None in an empty library."""
    entries: dict[str, Entry] = st.session_state["entries"]
    return entries.get(st.session_state.get("run", ""))


def label(entry: Entry) -> str:
    """The run's unique name in the picker, which does not change while the run exists.

    The browser identifies an option by its label alone, so nothing that changes, such as the status, may be in it. The
    part that distinguishes samples comes first: on a narrow page the bar has room for some 23 letters.
    """
    if entry.origin != "sample":
        return name_and_place(entry)
    if entry.group and entry.name == entry.path.name:
        return f"{entry.name} · sample of {entry.group}"
    return f"{name_and_place(entry)} · sample"


def name_and_place(entry: Entry) -> str:
    """The run's path in the library, preceded by its name if that differs."""
    place = entry.key if entry.origin == "elsewhere" else entry.key.partition("/")[2]
    return place if entry.name == entry.path.name else f"{entry.name} ({place})"


def baseline_first(keys: Iterable[str]) -> list[str]:
    """The keys with "fp32" in their run's name first, then the others, which are compared with those."""
    return sorted(keys, key=lambda key: "fp32" not in key.rpartition("/")[2])


def compare_address(keys: list[str]) -> dict[str, str | list[str]]:
    """The complete address of Compare with these runs: what the page itself added would be one more step for Back."""
    return {"run": st.session_state["run"], "with": keys}


def _follow_address(entries: dict[str, Entry]) -> None:
    """Take over the run from the address if it changed there: a deep link, or the browser's Back button."""
    asked, missing = st.query_params.get("run"), None
    known, (stale, since) = st.session_state.get("picker.address"), st.session_state.get(STALE, (None, 0.0))
    if asked == stale:
        if since is None or time.monotonic() - since < STALE_S:
            asked = None
    elif asked == known:  # the browser shows the new one
        st.session_state.pop(STALE, None)
    if asked and asked != known:
        if (key := run_list.key_of(entries, asked)) is not None:
            st.session_state["run"] = key
        else:
            missing = asked
    before = (st.session_state.get("run"), st.session_state.get("picker.address"))
    kept = next((key for key in before if key in entries), None)
    if kept is None and before[1] and before[1] != st.session_state.get("picker.let_go"):
        missing = missing or before[1]
    shown = kept or run_list.preferred(entries) or next(iter(entries), "")
    st.session_state["run"] = shown
    if missing:
        st.session_state["picker.missing"] = (missing, shown, None)
