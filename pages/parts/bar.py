"""The bar above every page: the run, its baseline and the steps that are shown. All three are in the address.

bar.show(page)                 # once a pass, before the page
run = bar.in_range(run)        # on the page: the chosen steps of a run

`?run=…&baseline=…&steps=100-200`; a link without `baseline` has FP32 of the same task, without `steps` all of them.
"""

from collections.abc import Mapping

import streamlit as st
from streamlit.navigation.page import StreamlitPage

from amp_core import Run, RunError
from amp_core.analysis import baseline_index
from pages.parts import address, loaders, picker
from pages.parts.library import run_list
from pages.parts.library.run_list import Entry

NO_BASELINE = "none"
NARROWED = "bar.narrowed"
WITHOUT_STEPS = frozenset({"Forecast", "Library", "Start a run", "Tune", "Format lab", "Findings guide"})
"""Titles of the pages that show nothing over steps: they open no run for the bar."""
TASK = ("workload", "size", "data")
STEPS = "bar.steps"
"""The chosen steps of any run, first and last; None for all."""


def show(page: StreamlitPage) -> None:
    """Draw the bar. Sets the library in `st.session_state["entries"]`, the chosen run's key in `["run"]`, and that of
    the baseline, or None, in `["bar.baseline"]`."""
    st.session_state[NARROWED] = None
    entries = picker.listed()
    if not entries:
        return
    with st.container(key="bar", horizontal=True, vertical_alignment="bottom"):
        with st.container(width="stretch"):
            picker.show(entries)
        with st.container(width="stretch"):
            _baseline(entries)
        if page.title not in WITHOUT_STEPS:
            _steps(picker.chosen())


def baseline() -> Entry | None:
    """The chosen baseline; None if there is none."""
    entries: dict[str, Entry] = st.session_state["entries"]
    return entries.get(st.session_state.get("bar.baseline") or "")


def chosen_steps() -> tuple[int, int] | None:
    """The first and the last step that are shown; None for all."""
    steps: tuple[int, int] | None = st.session_state.get(STEPS)
    return steps


def narrowed_to() -> tuple[int, int] | None:
    """The steps of the chosen run that the page shows; None for all."""
    steps: tuple[int, int] | None = st.session_state[NARROWED]
    return steps


def show_all_steps() -> None:
    """Callback: show all steps again."""
    st.session_state[STEPS] = None


def in_range(run: Run) -> Run:
    """The chosen steps of `run`; the run itself if all of its steps are chosen."""
    bounds = _bounds(run)
    if bounds is None or _within(chosen_steps(), bounds) == bounds:
        return run
    return loaders.within(run, *_within(chosen_steps(), bounds))


def default_baseline(entries: Mapping[str, Entry], key: str) -> str | None:
    """The key of the FP32 run of the same task and place as the run `key`; None if there is none."""
    own = entries[key]
    near = [own, *(e for e in entries.values() if e is not own and e.origin == own.origin and e.status == "finished")]
    place = baseline_index([e.config or {} for e in near], 0)
    return near[place].key if place is not None and near[place].key != key else None


def _baseline(entries: dict[str, Entry]) -> None:
    own = st.session_state["run"]
    others = [key for key, entry in entries.items() if entry.readable and key != own]
    others.sort(key=lambda key: _nearness(entries[key], entries[own]))
    default = default_baseline(entries, own) or NO_BASELINE
    task, config = st.session_state.get("bar.task"), entries[own].config or {}
    here = tuple(str(config.get(name)) for name in TASK)
    if task != here:  # a baseline of another task says nothing
        st.session_state["bar.task"] = here
        st.session_state.pop("bar.asked", None)
    options = [*others, NO_BASELINE]
    address.take("baseline", "bar.asked", lambda text: address.choice(options)(run_list.key_of(entries, text) or text))
    asked = st.session_state.get("bar.asked")
    address.set_value("baseline", asked if asked in options else default)
    chosen = st.selectbox(
        "Baseline",
        options,
        options.index(st.session_state["baseline"]),
        lambda key: "No baseline" if key == NO_BASELINE else picker.label(entries[key]),
        key="baseline",
        on_change=_baseline_changed,
        help="The run that every page compares with. FP32 of the same task unless you choose another.",
    )
    address.keep("baseline", "bar.asked", chosen if chosen != default else "")
    st.session_state["bar.baseline"] = chosen if chosen != NO_BASELINE else None


def _baseline_changed() -> None:
    st.session_state["bar.asked"] = st.session_state["baseline"]


def _nearness(entry: Entry, own: Entry) -> tuple[bool, bool]:
    """Runs of the same task first, FP32 before others."""
    config, task = entry.config or {}, own.config or {}
    return any(config.get(name) != task.get(name) for name in TASK), config.get("precision") != "fp32"


def _steps(entry: Entry | None) -> None:
    address.take("steps", STEPS, address.steps)
    bounds = None
    if entry is not None and entry.readable:
        try:
            bounds = _bounds(loaders.open_run(entry))
        except RunError:  # the page says so
            return
    if bounds is None or bounds[0] == bounds[1]:
        return
    low, high = bounds
    asked = chosen_steps()
    if asked is not None and (asked[1] < low or high < asked[0]):
        address.refuse("steps", f"{asked[0]}-{asked[1]}")
    shown = _within(asked, bounds)
    key = f"{STEPS}.{low}.{high}"
    address.set_value(key, shown)
    st.session_state[NARROWED] = shown if shown != bounds else None
    with st.container(horizontal=True, vertical_alignment="bottom", width="stretch"):
        st.slider("Steps", low, high, key=key, on_change=_steps_changed, args=(key, bounds))
        if shown != bounds:
            st.button("All", key="bar.all", type="tertiary", help="Show all steps", on_click=show_all_steps)
    address.keep("steps", STEPS, "" if asked is None else f"{asked[0]}-{asked[1]}")


def _within(asked: tuple[int, int] | None, bounds: tuple[int, int]) -> tuple[int, int]:
    """The steps of a run that are shown: all of them if it has none of the chosen ones."""
    low, high = bounds
    if asked is None or asked[1] < low or high < asked[0]:
        return bounds
    return max(low, asked[0]), min(high, asked[1])


def _steps_changed(key: str, bounds: tuple[int, int]) -> None:
    chosen = st.session_state[key]
    st.session_state[STEPS] = None if tuple(chosen) == bounds else tuple(chosen)


def _bounds(run: Run) -> tuple[int, int] | None:
    """The run's first and last recorded step; None if it has none."""
    steps = run.steps["step"]
    return (int(steps.min()), int(steps.max())) if len(steps) else None
