"""Keep the server's memory flat: allocator settings, and one garbage collection for all sessions.

    release_memory.at_once()      # as the server starts; only the first call changes anything
    release_memory.soon()         # after a pass
    release_memory.now()          # at once

A refresh of a live run allocates some megabytes of tables and arrays and frees them, in a thread that ends with it.
Arrow's own pool keeps what a thread freed for that thread, so the app would grow as it follows a run. glibc raises the
size from which it maps blocks one by one to the largest block ever freed, up to 32 MiB (mallopt(3), M_MMAP_THRESHOLD),
so that large blocks come to lie in a heap that cannot shrink; and it gives threads heaps of their own, up to eight per
core. Therefore Arrow uses the system's pool, the threshold stays at its first value, and threads share one heap
(Python's lock lets only one of them allocate mostly), whose free pages are given back. After seven pages and a live run
the server held 260 to 271 MiB without these settings and 204 to 219 with them. `ampscope serve` sets the same in the
environment, before there is a thread (`amp_core.library.permissions.HEAP`); trainings do not inherit it.

Figures and their parts refer to each other, so only Python's collector frees them. Streamlit collects after each pass
of each session (`runner.postScriptGC`), so its work grows with the sessions. One thread collects instead, for all
passes since the last time, at most a twentieth of the time.
"""

import ctypes
import functools
import gc
import os
import platform
import threading
import time

import pyarrow as pa

from amp_core.library.permissions import HEAP

MMAP_THRESHOLD_BYTES = 128 * 1024
"""glibc's own first value."""

AFTER_S = 0.1
"""From a pass to the collection: what the pass drew is sent first."""
PAUSE_S = 1.0
"""At least, between two collections."""
SHARE = 0.05
"""Of the time, at most, that goes into collecting."""

_asked = threading.Event()
_starting = threading.Lock()

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h


@functools.cache
def at_once() -> None:
    """Set all this for this process; where the C library is not glibc, Arrow's pool alone."""
    pa.default_memory_pool()  # asks the environment, once
    pa.set_memory_pool(pa.system_memory_pool())
    for name, value in HEAP.items():
        if os.environ.get(name) == value:
            del os.environ[name]
    libc = _glibc()
    if libc is not None:
        for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            libc.mallopt(option, MMAP_THRESHOLD_BYTES)
        libc.mallopt(_M_ARENA_MAX, 1)


def now() -> None:
    """Collect garbage and give back the pages of the heap in which nothing is left (malloc_trim(3))."""
    gc.collect()
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def soon() -> None:
    """The same in a thread of its own: a pass need not wait for it."""
    with _starting:
        _keeper()
    _asked.set()


@functools.cache
def _keeper() -> None:
    threading.Thread(target=_keep, name="ampscope-memory", daemon=True).start()


def _keep() -> None:
    while _asked.wait():
        time.sleep(AFTER_S)
        _asked.clear()  # whoever asks from here on is served by the next round
        began = time.perf_counter()
        now()
        time.sleep(max(PAUSE_S, (time.perf_counter() - began) / SHARE))


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
