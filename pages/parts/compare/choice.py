"""Which runs are compared: chosen on the page, kept in the address, and opened as far as they can be read."""

import streamlit as st

from amp_core import Run, RunError
from amp_core.analysis.performance.kernels import is_trace
from pages.parts import address, empty, loaders, picker, words
from pages.parts.library import run_list
from pages.parts.library.run_list import Entry

MAX_RUNS = 15


def pick() -> list[Entry]:
    """The chosen runs, the baseline first; kept in the address."""
    entries: dict[str, Entry] = st.session_state["entries"]
    known = [key for key, entry in entries.items() if entry.readable or entry.under_way]
    if not known:
        empty.no_runs()
    linked = [run_list.key_of(entries, asked) or asked for asked in st.query_params.get_all("with")]
    asked = [key for key in linked if key in known]
    for key in linked:
        if key not in entries:
            st.warning(f"There is no run {words.escape(key)} here; it is left out.")
        elif entries[key].status == "damaged":
            _left_out(entries[key], entries[key].sentence)
    if asked and asked != st.session_state.get("compare.address"):  # from a link or the browser's Back button
        address.set_value("compare.runs", asked[:MAX_RUNS])
    elif "compare.runs" not in st.session_state:
        st.session_state["compare.runs"] = _suggested(entries, known)
    address.set_value("compare.runs", [key for key in st.session_state["compare.runs"] if key in known])
    keys = st.multiselect(
        "Runs, the baseline first",
        known,
        st.session_state["compare.runs"],  # see picker.show: what is set alone may never reach the browser
        key="compare.runs",
        format_func=lambda key: picker.label(entries[key]),
        max_selections=MAX_RUNS,
        placeholder="Choose two runs or more",
        persist_state="session",
    )
    st.query_params["with"] = st.session_state["compare.address"] = keys
    return [entries[key] for key in keys]


def _suggested(entries: dict[str, Entry], known: list[str]) -> list[str]:
    """The chosen run, and the runs of the same place that train the same workload at the same size, FP32 first. Runs
    under way are included only if the chosen one is under way."""

    def turns(key: str) -> object:
        about = (entries[key].config or {}).get("comparison")
        return about.get("id") if isinstance(about, dict) else None

    def task(key: str) -> tuple[object, ...]:
        config = entries[key].config or {}
        return (entries[key].origin, config.get("workload"), config.get("size"))

    chosen = st.session_state["run"]
    now = chosen in known and entries[chosen].under_way
    fit = [key for key in known if now or not entries[key].under_way]
    keys = [key for key in fit if task(key) == task(chosen)] if chosen in known else fit[:1]
    keys.sort(key=lambda key: ((entries[key].config or {}).get("precision") != "fp32", key != chosen))
    together = [key for key in keys if turns(key) is not None and turns(key) == turns(keys[0])]
    if len(together) > 1:
        return together[:MAX_RUNS]
    return [*keys[:4], chosen] if chosen in keys[5:] else keys[:5]


def opened(entries: list[Entry]) -> list[Run]:
    """The runs that can be read and have steps; among traces, those without marked steps too. Shows a sentence for each
    of the others."""
    read = []
    for entry in entries:
        try:
            run = loaders.open_run(entry)
            if not (run.steps.empty and entry.under_way):  # its status line shows that
                read.append((entry, run))
        except RunError as error:
            _left_out(entry, error)
    if all(is_trace(run) and run.table("windows").num_rows for _, run in read):
        return [run for _, run in read]
    for entry, run in read:
        if run.steps.empty:
            relative = " Step cost sets a trace beside another run." if run.table("windows").num_rows else ""
            st.info(f"{words.escape(entry.name)} has no steps and is left out.{relative}")
    return [run for _, run in read if not run.steps.empty]


def _left_out(entry: Entry, why: object) -> None:
    """Show the name of a run that cannot be read, and why."""
    st.error(f"{words.escape(entry.name)} is left out: {words.escape(words.sentence(why))}")
