"""Open runs and analyse them, each thing once.

    >>> run = open_run(entry)
    >>> view = analysed(overview, run)

Sessions that look at one run share it: it is read by one of them, and each gets a snapshot that nobody changes. What an
analysis made of a snapshot is shared like it, and what it made of a run that no longer grows is remembered under the
fingerprint of the run's files. When the last session that looks at a run closes, all of it is gone.

Pages, widgets and closed tabs that may come back keep the snapshot that they were shown, so that memory must not depend
on who still has one: what was read and made of a snapshot is given back as soon as there is a newer one and the passes
that began with it have ended. Whoever asks an old one after that has it read again, as the run is by then.
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
from amp_core.store.untrusted.sandbox import Sandbox
from pages.parts.library.run_list import Entry

T = TypeVar("T")

KEPT = 6
"""Runs that a session keeps open."""

MAX_REMEMBERED = 1024
"""What is remembered of runs that have ended: some 35 answers and 0.1 to 2 MB a run, so all pages of thirty runs."""

FRESH_S = 0.9
"""So old may what a session is shown be, where another session has read it. Each session's own looks read anew."""


class _Shared:
    """One run, for all sessions."""

    def __init__(self, run: Extract) -> None:
        self._lock = threading.Lock()
        self._read_at = time.monotonic()
        self._snapshot = run
        self._older: WeakSet[Extract] = WeakSet()
        self._passes: WeakKeyDictionary[threading.Thread, WeakSet[Extract]] = WeakKeyDictionary()

    def look(self, before: Run | None) -> Run:
        """The run as it is now; as another session read it a moment ago, where this one has not seen that yet."""
        with self._lock:
            if before is self._snapshot or time.monotonic() - self._read_at > FRESH_S:
                newer = self._snapshot.snapshot()  # holds what sessions have read of the older one
                if newer.refresh():
                    self._older.add(self._snapshot)
                    self._snapshot = newer
                    self._let_go()
                self._read_at = time.monotonic()
            self._passes.setdefault(threading.current_thread(), WeakSet()).add(self._snapshot)
            return self._snapshot

    def _let_go(self) -> None:
        """Give back what older snapshots hold; Streamlit runs each pass in a thread that ends with it."""
        in_use = {run for thread, runs in self._passes.items() if thread.is_alive() for run in runs} | set(_held)
        for run in self._older - in_use:
            run.forget()
            _made.pop(run, None)


_shared: WeakValueDictionary[str, _Shared] = WeakValueDictionary()
_made: WeakKeyDictionary[Run, tuple[threading.RLock, dict[Any, Any]]] = WeakKeyDictionary()
_held: WeakSet[Run] = WeakSet()
_files_of: WeakKeyDictionary[Run, str] = WeakKeyDictionary()
"""The files of each run as the last pass found them: one look at a folder of some hundred files for all its numbers."""
_opening = threading.Lock()
_sandbox = Sandbox()


def open_run(entry: Entry) -> Run:
    """The entry's run, up to date and, once it has ended, checked in full: other programs write runs too.

    Raises `RunError` where it cannot be read or is not what a run must be.
    """
    opened: dict[str, tuple[_Shared | None, Run]] = st.session_state.setdefault("loaders.runs", {})
    shared, run = opened.pop(str(entry.path), (None, None))
    if shared is not None:
        run = shared.look(run)
    elif run is not None:
        run.refresh()
    else:
        shared, run = _open(entry)
    run.called = entry.name
    opened[str(entry.path)] = shared, run  # put last: the first is the one not looked at for longest
    while len(opened) > KEPT:
        opened.pop(next(iter(opened)))
    if not run.is_live:
        _files_of[run] = _files(run)
        analysed(check, run)
    return run


def hold(run: Run) -> None:
    """Keep the run as it is now for whoever has it: a view that was paused does not move on."""
    _held.add(run)


def _open(entry: Entry) -> tuple[_Shared | None, Run]:
    with _opening:
        shared = _shared.get(str(entry.path))
        if shared is None:
            own = entry.origin in ("sample", "upload")  # shipped with AMPscope, or written anew by it
            run = open_extract(entry.path, sandbox=None if own else _sandbox)
            if not isinstance(run, Extract):  # at an address: each session has its own
                return None, run
            shared = _shared[str(entry.path)] = _Shared(run)
    return shared, shared.look(None)


def check(run: Run) -> None:
    """Raises `RunError` where a run that has ended is not what it must be."""
    run.validate(full=True)


def analysed(function: Callable[..., T], of: Run | Sequence[Run], *args: Any, **options: Any) -> T:
    """`function(of, *args, **options)`, remembered as long as its runs do not change. Do not change what it gives."""
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
    """Where the run lies, its name and which files it has, in short: Streamlit takes a key apart at every look-up."""
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
