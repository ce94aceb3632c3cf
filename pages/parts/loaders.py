"""Open runs and analyse them, once for all sessions.

    >>> run = open_run(entry)
    >>> view = analysed(overview, run)

Sessions that show the same run share it: one of them reads it, and each gets a snapshot that nobody changes. Analyses
of a snapshot are shared too. Those of a run that has ended are cached under the fingerprint of the run's files. When
the last session that shows a run closes, its data is freed.

Pages, widgets and closed tabs that may come back keep the snapshot that they were shown. Memory must not depend on
them: the data of a snapshot is freed as soon as there is a newer one and the passes that began with it have ended. A
later call on an old snapshot reads the run again, as it is by then.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import streamlit as st

from amp_core import Run
from amp_core.store.long_runs.extract import Extract, open_extract
from amp_core.store.step_range import StepRange, whole, within_steps
from amp_core.store.untrusted.sandbox import Sandbox
from pages.parts.library.run_list import Entry

T = TypeVar("T")

MAX_OPEN_RUNS = 6
"""Runs that a session keeps open."""

MAX_REMEMBERED = 1024
"""Cached results of ended runs: some 35 results and 0.1 to 2 MB per run, so all pages of thirty runs."""

FRESH_S = 0.9
"""A session may show what another one read up to this long ago. Its own refreshes always read."""


class _Shared:
    """One run, for all sessions."""

    def __init__(self, run: Extract) -> None:
        self._lock = threading.Lock()
        self._read_at = time.monotonic()
        self._snapshot = run
        self._older: WeakSet[Extract] = WeakSet()
        self._passes: WeakKeyDictionary[threading.Thread, WeakSet[Extract]] = WeakKeyDictionary()

    def refreshed(self, before: Run | None) -> Run:
        """The run as it is now, or as another session read it up to `FRESH_S` ago if that is new to this one."""
        with self._lock:
            if before is self._snapshot or time.monotonic() - self._read_at > FRESH_S:
                newer = self._snapshot.snapshot()  # with what was read through the older one
                if newer.refresh():
                    self._older.add(self._snapshot)
                    self._snapshot = newer
                    self._release_older()
                self._read_at = time.monotonic()
            self._passes.setdefault(threading.current_thread(), WeakSet()).add(self._snapshot)
            return self._snapshot

    def _release_older(self) -> None:
        """Free the data of older snapshots; Streamlit runs each pass in a thread that ends with it."""
        in_use = {run for thread, runs in self._passes.items() if thread.is_alive() for run in runs} | set(_pinned)
        for run in self._older - in_use:
            run.forget()
            _made.pop(run, None)


_shared: WeakValueDictionary[str, _Shared] = WeakValueDictionary()
_made: WeakKeyDictionary[Run, tuple[threading.RLock, dict[Any, Any]]] = WeakKeyDictionary()
_pinned: WeakSet[Run] = WeakSet()
_files_of: WeakKeyDictionary[Run, str] = WeakKeyDictionary()
"""The fingerprint of each run as of the last pass: one scan of a folder of some hundred files per pass."""
_opening = threading.Lock()
_sandbox = Sandbox()


def open_run(entry: Entry) -> Run:
    """The entry's run, up to date and, once it has ended, validated in full: other programs write runs too.

    Of a damaged run the sound tables are read; pages show `damage()`. Raises `RunError` if it cannot be read.
    """
    opened: dict[str, tuple[_Shared | None, Run]] = st.session_state.setdefault("loaders.runs", {})
    shared, run = opened.pop(str(entry.path), (None, None))
    if shared is not None:
        run = shared.refreshed(run)
    elif run is not None:
        run.refresh()
    else:
        shared, run = _open(entry)
    run.called = entry.name
    opened[str(entry.path)] = shared, run  # put last: the first is the least recently used
    while len(opened) > MAX_OPEN_RUNS:
        opened.pop(next(iter(opened)))
    if not run.is_live:
        _files_of[run] = _files(run)
        for table, reason in analysed(check, run).items():
            if not run.damaged(table):  # it can be decoded, but holds impossible values
                run.set_aside(table, reason)
    return run


def within(run: Run, first: int, last: int) -> Run:
    """The steps of `run` from `first` to `last`: the same object in each pass while the run does not change."""
    parts: dict[str, tuple[Run, StepRange]] = st.session_state.setdefault("loaders.parts", {})
    known, part = parts.pop(str(run.path), (None, None))
    if part is None or known is not run or run.is_live or (part.first, part.last) != (first, last):
        part = within_steps(run, first, last)
    parts[str(run.path)] = run, part
    while len(parts) > MAX_OPEN_RUNS:
        parts.pop(next(iter(parts)))
    if run in _files_of:
        _files_of[part] = f"{_files_of[run]} {first}-{last}"
    return part


def pin(run: Run) -> None:
    """Keep this snapshot's data, for a view that is paused."""
    _pinned.add(run)


def _open(entry: Entry) -> tuple[_Shared | None, Run]:
    with _opening:
        shared = _shared.get(str(entry.path))
        if shared is None:
            own = entry.origin in ("sample", "upload")  # shipped with AMPscope, or rewritten by it
            run = open_extract(entry.path, sandbox=None if own else _sandbox).salvaged()
            if not isinstance(run, Extract):  # remote: each session has its own
                return None, run
            shared = _shared[str(entry.path)] = _Shared(run)
    return shared, shared.refreshed(None)


def check(run: Run) -> dict[str, str]:
    """The tables that are damaged or invalid, and why. Raises `RunError` if the run cannot be shown at all."""
    run.validate(full=True)
    return run.damage()


def analysed(function: Callable[..., T], of: Run | Sequence[Run], *args: Any, **options: Any) -> T:
    """`function(of, *args, **options)`, cached while its runs do not change. Do not modify the result.

    Findings are about whole runs: of a part of a run they get the whole.
    """
    if function.__module__.startswith("amp_core.findings"):
        of = [whole(run) for run in of] if isinstance(of, Sequence) else whole(of)
    runs = list(of) if isinstance(of, Sequence) else [of]
    name = f"{function.__module__}.{function.__qualname__}"
    parameters = (args, tuple(sorted(options.items())))
    if not any(run.is_live for run in runs):
        files = [_files_of.get(run) or _files(run) for run in runs]
        remembered: T = _remembered(function, of, name, files, parameters)
        return remembered
    if isinstance(of, Sequence) or not isinstance(of, Extract):
        return function(of, *args, **options)
    with _opening:
        lock, made = _made.setdefault(of, (threading.RLock(), {}))
    with lock:
        if (name, parameters) not in made:
            made[name, parameters] = function(of, *args, **options)
        answer: T = made[name, parameters]
        return answer


def _files(run: Run) -> str:
    """A short hash of the run's path, name and fingerprint: Streamlit hashes a long key on each look-up."""
    return hashlib.blake2b(repr((str(run.path), run.name, run.fingerprint())).encode()).hexdigest()


@st.cache_data(max_entries=MAX_REMEMBERED, show_spinner=False)
def _remembered(
    _function: Callable[..., Any],
    _of: Run | Sequence[Run],
    name: str,  # noqa: ARG001 - this and `files` are the key under which it is remembered
    files: list[str],  # noqa: ARG001
    parameters: tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]],
) -> Any:
    args, options = parameters
    return _function(_of, *args, **dict(options))
