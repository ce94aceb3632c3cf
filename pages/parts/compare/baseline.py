"""The picker for a run to compare the shown run with."""

import streamlit as st

from amp_core import Run
from pages.parts import loaders, picker
from pages.parts.library.run_list import Entry


def pick(run: Run, key: str) -> Run | None:
    """The chosen baseline of `run`; FP32 of the same workload is offered first. None if none is chosen.

    `key` is the widget's.
    """
    entries: dict[str, Entry] = st.session_state["entries"]
    others = {name: entry for name, entry in entries.items() if entry.readable and name != st.session_state["run"]}
    task = [run.head.config.get(name) for name in ("workload", "size", "device")]

    def nearness(name: str) -> tuple[bool, bool]:
        config = others[name].config or {}
        return [config.get(n) for n in ("workload", "size", "device")] != task, config.get("precision") != "fp32"

    st.header("Beside another run", anchor=False)
    chosen = st.selectbox(
        "Baseline of this run",
        sorted(others, key=nearness),
        index=None,
        format_func=lambda name: picker.label(others[name]),
        placeholder="FP32 beside AMP, for one",
        key=key,
    )
    return loaders.open_run(others[chosen]) if chosen is not None else None
