"""Work done before a user waits for it: imports, analyses of samples and of the pages after Overview.

    warm_up.prepare_process()           # before the server answers
    warm_up.analyse_first_page()        # likewise
    warm_up.analyse_samples()           # as the server starts
    warm_up.analyse_other_pages(run)    # when Overview is drawn
    warm_up.load_widgets()              # likewise

Measured with tests/browser/measure.py, one part switched off at a time, on two busy cores:

| without | what it costs |
|---|---|
| `disable_nagle` | each small answer takes 48 ms instead of 1 |
| imports in `prepare_process` | the first page takes 840 ms of the server's processor time instead of 460 |
| `analyse_first_page` | the first page's pass takes 850 to 1,090 ms of it instead of 140 to 200 |
| `analyse_samples` | the first visit of Library takes 710 ms of it instead of 100 |
| `analyse_other_pages` | seven page changes take 1,270 ms of it instead of 530 |
| `load_widgets` | the first page change takes 0.4 s longer, of which 0.1 s in the browser's main thread |

`prepare_process` also freezes (`gc.freeze`) the objects that imports make: a collection spends 80 ms on them.
`analyse_first_page` takes 0.8 s, but before the browser, the server's messages and Python's lock compete with it.
`analyse_samples` waits some seconds, since the first visitor would share two cores and the GIL with it.
"""

import contextlib
import gc
import importlib
import inspect
import pkgutil
import socket
import sys
import threading
import time

import streamlit as st

import pages.parts
from amp_core import Run, RunError, diagnose
from amp_core.analysis import (
    baseline_changes,
    compare,
    device_samples,
    lost_gradient,
    overview,
    phase_times,
    predicted_and_audited,
    safe_window,
    safe_window_over_time,
    scale_summary,
    skip_episodes,
)
from amp_core.analysis.numerics.layers import tensor_names
from amp_core.findings import first_sentence
from amp_core.store.long_runs.extract import open_extract
from amp_core.views import GRAD_NORM, LOSS, LOSS_SCALE, LOSSES, MEMORY
from pages.parts import bar, loaders, release_memory
from pages.parts.diagnosed import chain
from pages.parts.hardware import memory, profiled
from pages.parts.library import run_list
from pages.parts.library.run_list import Entry
from pages.parts.numbers import ranges, tensor
from pages.parts.words import KIND_LABELS

SWITCH_INTERVAL_S = 0.0005
"""A tenth of Python's default."""
LOSS_SCALE_ANALYSES = (scale_summary, skip_episodes, safe_window_over_time, safe_window, predicted_and_audited)
"""The slowest analyses of Loss scale."""
PAGE_ANALYSES = (ranges.prepare, tensor.prepare, memory.prepare, profiled.prepare)
"""Analyses of other pages."""
REPORTED_BY_PAGE = (RunError, OSError)
"""Errors that the page itself shows: a damaged run, or one that was renamed or deleted while it was read."""
AHEAD = "ahead"
INTERNET = (socket.AF_INET, socket.AF_INET6)
_analysing = threading.Lock()
PAUSE_S = 3.0
"""Time from the server's start: the first seconds belong to the first visitor's page."""
DRAWING_S = 1.0
"""Time that a page has to be sent and drawn before the others are analysed."""


def prepare_process() -> None:
    """Configure memory and sockets, import all parts of the pages, and exempt those objects from garbage collection."""
    release_memory.configure_allocator()
    disable_nagle()
    importlib.import_module("PIL.Image")  # Streamlit opens the tab's icon with it
    for part in pkgutil.walk_packages(pages.parts.__path__, "pages.parts."):
        importlib.import_module(part.name)
    inspect.stack()  # Streamlit does this once; Python then lists the files of all modules, for 0.15 s
    gc.collect()
    gc.freeze()


def disable_nagle() -> None:
    """Switch Nagle's algorithm off for the server's listening sockets; connections inherit it.

    asyncio does so for TCP, but Streamlit binds its socket without naming the protocol, so asyncio does not recognise
    it. An answer of two writes then waits 40 ms until the browser acknowledges the first one, and an app's frame has
    sixty files. Nothing hands out Streamlit's socket, so it is looked up among all objects. Source:
    https://github.com/Kludex/uvicorn/issues/3149.
    """
    for thing in gc.get_objects():
        if type(thing) is socket.socket and thing.type == socket.SOCK_STREAM and thing.family in INTERNET:
            with contextlib.suppress(OSError):  # a closed socket
                thing.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted connections inherit it


def analyse_samples() -> threading.Thread:
    """Analyse the samples in a thread."""
    thread = threading.Thread(target=_analyse_yielding, name="ampscope-ahead", daemon=True)
    thread.start()
    return thread


def analyse_other_pages(run: Run) -> threading.Thread | None:
    """Analyse a finished run for the other pages in a thread. None for a live run, or while another run is analysed."""
    if run.is_live or not _analysing.acquire(blocking=False):
        return None
    thread = threading.Thread(target=_analyse_pages, args=(run,), name="ampscope-ahead", daemon=True)
    thread.start()
    return thread


def load_widgets() -> None:
    """Draw hidden widgets at the end of a page: the browser then loads Streamlit's code for them (1.7 MB) while the
    user reads, and not when the next page is opened."""
    with st.container(key=AHEAD):
        st.html(f"<style>.st-key-{AHEAD} {{display: none}}</style>")
        st.dataframe({"": [0]})
        st.segmented_control("ahead", ["a"], key=f"{AHEAD}.choice")
        st.slider("ahead", 0, 1, key=f"{AHEAD}.slider")
        st.toggle("ahead", key=f"{AHEAD}.toggle")
        st.text_input("ahead", key=f"{AHEAD}.text")
        st.number_input("ahead", key=f"{AHEAD}.number")
        st.multiselect("ahead", ["a"], key=f"{AHEAD}.several")


def _analyse_pages(run: Run) -> None:
    time.sleep(DRAWING_S)
    try:
        for function in LOSS_SCALE_ANALYSES:
            with contextlib.suppress(*REPORTED_BY_PAGE):  # without gradients there is no window: the page says so
                loaders.analysed(function, run)
        for view in (LOSS_SCALE, GRAD_NORM):
            with contextlib.suppress(*REPORTED_BY_PAGE):
                view.frame(run, loaders.analysed)
        for prepare in PAGE_ANALYSES:
            with contextlib.suppress(*REPORTED_BY_PAGE):
                prepare(run)
    finally:
        _analysing.release()


def _analyse_yielding() -> None:
    """Analyse with a shorter switch interval: meanwhile the server sends the browser a hundred files, and each may wait
    for the GIL more than once."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        _analyse()
    finally:
        sys.setswitchinterval(before)


def _analyse() -> None:
    time.sleep(PAUSE_S)
    try:
        for entry in run_list.listing().values():
            if entry.origin == "sample":
                _analyse_for_library(entry)
    except REPORTED_BY_PAGE:
        return


def analyse_first_page() -> None:
    """Analyse the run that Overview opens with, and its baseline, and draw a figure. The server answers after that, so
    only samples are, which take 0.8 s."""
    entries = run_list.listing()
    first = run_list.preferred(entries)
    if first is None or entries[first].origin != "sample":
        return
    base = entries.get(bar.default_baseline(entries, first) or "")
    try:
        run = _analyse_for_library(entries[first])
        _draw_ahead(run, _analyse_for_library(base) if base is not None else None)
    except REPORTED_BY_PAGE:
        return


def _analyse_for_library(entry: Entry) -> Run:
    """The analyses that the Library needs of each run."""
    run = open_extract(entry.path).salvaged()
    run.called = entry.name
    for function in (loaders.check, overview, diagnose):
        loaders.analysed(function, run)
    return run


def _draw_ahead(run: Run, base: Run | None) -> None:
    """The other analyses of Overview, and a figure: plotly reads its classes one by one on first use."""
    for function in (first_sentence, phase_times, device_samples, lost_gradient):
        loaders.analysed(function, run)
    chain(run)
    for kind in KIND_LABELS:
        loaders.analysed(tensor_names, run, kind)
    if base is not None:
        loaders.analysed(compare, [base, run])
        loaders.analysed(baseline_changes, [base, run])
        LOSSES.draw([base, run], ask=loaders.analysed)
    MEMORY.frame(run, loaders.analysed)
    LOSS.draw(run, ask=loaders.analysed).to_json()
