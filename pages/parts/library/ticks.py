"""Which rows of the library's table are ticked; the one that was ticked last is the chosen run."""

import zlib
from collections.abc import Sequence

import streamlit as st

from pages.parts import picker


def table_key() -> str:
    """Changes, which makes a new table with the right rows ticked, when the picker was used or other runs are listed:
    the browser knows ticks by row number."""
    shown = "\n".join(st.session_state["library.shown"])
    return f"library.table.{st.session_state.get('picker.turn', 0)}.{zlib.crc32(shown.encode())}"


def at_first(key: str) -> list[int]:
    """The rows that are ticked when the table with that key is first drawn: the chosen run and those ticked before."""
    ticks: tuple[str, list[int]] = st.session_state.get("library.ticks", ("", []))
    drawn, numbers = ticks
    if drawn != key:
        wanted = {st.session_state["run"], *st.session_state.get("library.ticked", [])}
        numbers = [row for row, shown in enumerate(st.session_state["library.shown"]) if shown in wanted]
        st.session_state["library.ticks"] = (key, numbers)
    return numbers


def pick() -> None:
    """Callback of the table: the row that was ticked last becomes the chosen run."""
    keys: list[str] = st.session_state["library.shown"]
    ticked = [keys[row] for row in st.session_state[table_key()]["selection"]["rows"] if row < len(keys)]
    before = st.session_state.get("library.ticked", [])
    st.session_state["library.ticked"] = ticked
    picker.choose(chosen(ticked, before, st.session_state["run"]))


def chosen(ticked: Sequence[str], before: Sequence[str], current: str) -> str:
    """The run that a change of ticks chooses: the new one or, if the current run was unticked, another one. The current
    run is ticked from the start, without a click."""
    new = [key for key in ticked if key not in before and key != current]
    if new:
        return new[-1]
    return ticked[-1] if ticked and current not in ticked else current
