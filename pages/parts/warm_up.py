"""What every page needs is imported once, before somebody waits for the first one.

    warm.up()      # before the server answers
    warm.ahead()   # as the server starts
    warm.further(run)      # when Overview is drawn
    warm.browser()         # likewise

pandas, pyarrow, plotly and the pages' own parts take half a second. They make some hundred thousand objects that stay
as long as the server; a collection of garbage looks through those for 80 ms, in which no page is sent. They are set
aside here: collecting goes on (`release_memory`), over what pages make.

Some seconds after the server's start the run that a newcomer sees is analysed, and then the other samples, whose
verdicts the Library shows. Not at once: whoever comes as the server starts would share two cores and Python's lock with
that, and see the verdict a fifth later. While somebody reads the Overview of a run, what the next page will ask is
analysed, and the browser loads what draws tables and fields: 1.7 MB, of which a slow one takes a quarter of a second to
make sense, and fields would come after all charts.
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
from amp_core.store.long_runs.extract import open_extract
from amp_core.views import LOSS
from pages.parts import loaders, release_memory
from pages.parts.hardware import memory, profiled
from pages.parts.library import run_list
from pages.parts.library.run_list import Entry
from pages.parts.numbers import ranges, tensor
from pages.parts.overview import costs_and_gains
from pages.parts.words import KIND_LABELS

SWITCH_S = 0.0005
"""A tenth of Python's own."""
FURTHER = (scale_summary, skip_episodes, safe_window_over_time, safe_window, predicted_and_audited)
"""What Loss scale asks that takes longest."""
PREPARE = (ranges.prepare, tensor.prepare, memory.prepare, profiled.prepare)
"""The same for other pages."""
TOLD = (RunError, OSError)
"""What whoever opens the page is told: of a run with faults, or one that was renamed or deleted while it was read."""
AHEAD = "ahead"
INTERNET = (socket.AF_INET, socket.AF_INET6)
_at_it = threading.Lock()
PAUSE_S = 3.0
"""From the server's start: a newcomer's first seconds are the page's."""


def up() -> None:
    """Settle where memory comes from, import all parts and what they import, and set aside what is there."""
    release_memory.at_once()
    send_at_once()
    importlib.import_module("PIL.Image")  # with which Streamlit looks at the tab's icon
    for part in pkgutil.walk_packages(pages.parts.__path__, "pages.parts."):
        importlib.import_module(part.name)
    inspect.stack()  # Streamlit looks once who calls it; Python then lists the files of all modules, for 0.15 s
    gc.collect()
    gc.freeze()


def send_at_once() -> None:
    """Let the server's connections, those there are and those to come, send what is written as it is written.

    Streamlit binds its socket without naming the protocol, and asyncio, which switches Nagle's algorithm off for TCP,
    does not take it for that. Each answer of two writes then waits until the browser acknowledges the first one, for
    40 ms: the sixty files of an app's frame, six at a time, come half a second later than they might, and what a page
    sends on the WebSocket late as well. Source: https://github.com/Kludex/uvicorn/issues/3149.
    """
    for thing in gc.get_objects():
        if type(thing) is socket.socket and thing.type == socket.SOCK_STREAM and thing.family in INTERNET:
            with contextlib.suppress(OSError):  # a closed one
                thing.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # what it accepts inherits it


def ahead() -> threading.Thread:
    """Begin to analyse the samples, that of the first page first, in a thread of its own."""
    thread = threading.Thread(target=_give_way, name="ampscope-ahead", daemon=True)
    thread.start()
    return thread


def further(run: Run) -> threading.Thread | None:
    """Begin to analyse for other pages a run that has ended; None while another is at that."""
    if run.is_live or not _at_it.acquire(blocking=False):
        return None
    thread = threading.Thread(target=_look_further, args=(run,), name="ampscope-ahead", daemon=True)
    thread.start()
    return thread


def browser() -> None:
    """What other pages begin with, at the end of this one, where nobody sees it: the browser loads the parts of
    Streamlit that draw it when this page is there, and not while somebody waits for the next one."""
    with st.container(key=AHEAD):
        st.html(f"<style>.st-key-{AHEAD} {{display: none}}</style>")
        st.dataframe({"": [0]})
        st.segmented_control("ahead", ["a"], key=f"{AHEAD}.choice")
        st.slider("ahead", 0, 1, key=f"{AHEAD}.slider")
        st.toggle("ahead", key=f"{AHEAD}.toggle")
        st.text_input("ahead", key=f"{AHEAD}.text")
        st.number_input("ahead", key=f"{AHEAD}.number")
        st.multiselect("ahead", ["a"], key=f"{AHEAD}.several")


def _look_further(run: Run) -> None:
    try:
        for function in FURTHER:
            with contextlib.suppress(*TOLD):  # without gradients there is no window: the page says so
                loaders.analysed(function, run)
        for prepare in PREPARE:
            with contextlib.suppress(*TOLD):
                prepare(run)
    finally:
        _at_it.release()


def _give_way() -> None:
    """Analyse, and meanwhile let go of Python's lock when another thread has waited for `SWITCH_S`: the server hands
    the browser a hundred files, and each may wait that long more than once."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        _analyse()
    finally:
        sys.setswitchinterval(before)


def _analyse() -> None:
    time.sleep(PAUSE_S)
    entries = run_list.listing()
    first = run_list.preferred(entries)
    base = costs_and_gains.baseline(entries, first) if first is not None else None
    samples = [entry for entry in entries.values() if entry.origin == "sample"]
    soon = [entry for entry in samples if entry.key == first or entry is base]
    try:
        runs = {entry.key: _look_into(entry) for entry in soon}
        if first in runs:
            _draw_ahead(runs[first], runs.get(base.key) if base is not None else None)
        for entry in samples:
            _look_into(entry)
    except TOLD:
        return


def _look_into(entry: Entry) -> Run:
    """What the Library asks of each run."""
    run = open_extract(entry.path)
    run.called = entry.name
    for function in (loaders.check, overview, diagnose):
        loaders.analysed(function, run)
    return run


def _draw_ahead(run: Run, base: Run | None) -> None:
    """What Overview asks besides, and a figure: plotly reads its classes one by one when they are first used."""
    for function in (phase_times, device_samples, lost_gradient):
        loaders.analysed(function, run)
    for kind in KIND_LABELS:
        loaders.analysed(tensor_names, run, kind)
    if base is not None:
        loaders.analysed(compare, [base, run])
    LOSS.draw(run, ask=loaders.analysed).to_json()
