"""The run picker of the bar, kept in step with `?run=` in the address so that a view can be sent to a colleague."""

from collections.abc import Iterable

import streamlit as st

from pages.parts import address, callbacks, words
from pages.parts.library import run_list
from pages.parts.library.run_list import Entry

WANTED = "picker.wanted"
"""The run that a callback chose, and the one before it, until a pass has drawn it. A pass that interrupts begins with
what the browser showed before."""


def listed() -> dict[str, Entry]:
    """The library, also in `st.session_state["entries"]`; takes over the run that the address asks for."""
    entries = run_list.listing()
    st.session_state["entries"] = entries
    _follow_address(entries)
    return entries


def show(entries: dict[str, Entry]) -> None:
    """Draw the picker: sets the chosen key in `st.session_state["run"]`."""
    keys = list(entries)
    # A value set in one pass is lost if the next pass arrives before the browser drew the first: it then shows, and
    # later sends, the widget's own default.
    at_first = keys.index(st.session_state["run"])
    st.selectbox("Run", keys, at_first, lambda key: label(entries[key]), key="run", on_change=_picked)
    st.query_params["run"] = st.session_state["picker.address"] = st.session_state["run"]


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
def _picked() -> None:
    wanted, before = callbacks.do(st.session_state.get, WANTED, (None, None))
    if wanted is not None and callbacks.do(st.session_state.get, "run") == before:  # what the browser still shows
        callbacks.put("run", wanted)
        return
    callbacks.put(WANTED, (None, None))
    callbacks.put("picker.turn", callbacks.do(st.session_state.get, "picker.turn", 0) + 1)


@callbacks.uninterrupted
def mark_deleted(key: str) -> None:
    """Note that this run was deleted here: showing another one then needs no notice."""
    callbacks.put("picker.let_go", key)


@callbacks.uninterrupted
def choose(key: str) -> None:
    """Make `key` the chosen run. For callbacks: the picker must not have been drawn yet in this pass."""
    wanted, before = callbacks.do(st.session_state.get, WANTED, (None, None))
    callbacks.put(WANTED, (key, before if wanted is not None else callbacks.do(st.session_state.get, "run")))
    callbacks.put("run", key)


def drawn() -> None:
    """After a pass that was not interrupted: the browser knows the chosen run."""
    st.session_state[WANTED] = (None, None)


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
    """Take over a run that a callback chose, or one from the address if it changed there: a deep link, or the browser's
    Back button."""
    wanted, _ = st.session_state.get(WANTED, (None, None))
    if wanted in entries:
        st.session_state["run"] = wanted
        return
    asked, missing = st.query_params.get("run"), None
    if asked and asked != st.session_state.get("picker.address"):
        if (key := run_list.key_of(entries, asked)) is not None:
            address.set_value("run", key)
        else:
            missing = asked
    # A pass that was under way when the run was renamed sends the old label, which is no option any more.
    before = (st.session_state.get("run"), st.session_state.get("picker.address"))
    kept = next((key for key in before if key in entries), None)
    if kept is None and before[1] and before[1] != st.session_state.get("picker.let_go"):
        missing = missing or before[1]
    shown = kept or run_list.preferred(entries) or next(iter(entries), "")
    address.set_value("run", shown)
    if missing:
        st.session_state["picker.missing"] = (missing, shown, None)
