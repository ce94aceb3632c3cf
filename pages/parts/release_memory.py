"""Keep the server's memory flat: allocator settings, and one garbage collection for all sessions.

    release_memory.configure_allocator()  # as the server starts; only the first call changes anything
    release_memory.collect_soon()         # after a pass
    release_memory.collect()              # at once

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
"""glibc's initial value."""

DELAY_S = 0.1
"""From a pass to the collection: the page is sent first."""
PAUSE_S = 1.0
"""Minimum time between two collections."""
MAX_TIME_FRAC = 0.05
"""Maximum share of the time that goes into collecting."""

_asked = threading.Event()
_starting = threading.Lock()

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h


@functools.cache
def configure_allocator() -> None:
    """Configure the allocators of this process; without glibc, only Arrow's pool."""
    pa.default_memory_pool()  # reads the environment, once
    pa.set_memory_pool(pa.system_memory_pool())
    for name, value in HEAP.items():
        if os.environ.get(name) == value:
            del os.environ[name]
    libc = _glibc()
    if libc is not None:
        for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            libc.mallopt(option, MMAP_THRESHOLD_BYTES)
        libc.mallopt(_M_ARENA_MAX, 1)


def collect() -> None:
    """Collect garbage and return free heap pages to the system (malloc_trim(3))."""
    gc.collect()
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def collect_soon() -> None:
    """Request a collection in the background; a pass does not wait for it."""
    with _starting:
        _start_collector()
    _asked.set()


@functools.cache
def _start_collector() -> None:
    threading.Thread(target=_collect_on_request, name="ampscope-memory", daemon=True).start()


def _collect_on_request() -> None:
    while _asked.wait():
        time.sleep(DELAY_S)
        _asked.clear()  # later requests are served by the next round
        began = time.perf_counter()
        collect()
        time.sleep(max(PAUSE_S, (time.perf_counter() - began) / MAX_TIME_FRAC))


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
