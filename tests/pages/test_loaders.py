"""The data of a run that pages hold: only the newest snapshot of a live run, even if older ones are still
referenced."""

import gc
import os
import shutil
import subprocess
import sys
import threading
import tomllib
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import streamlit as st

from amp_core.analysis import overview, scale_trace
from amp_core.library.permissions import HEAP
from amp_core.store.long_runs.extract import Extract, open_extract
from pages.parts import loaders, release_memory
from pages.parts.library.run_list import Entry
from tests.synthetic import SyntheticRun, live, write

T = TypeVar("T")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path):
    with live(tmp_path / "a") as run:
        run.advance(20)
        yield run


def in_a_pass(work: Callable[[], T]) -> T:
    """Run `work` like a pass of Streamlit: in a thread that ends with it."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def refresh_and_analyse(shared: loaders._Shared, before: Extract | None) -> Extract:
    """A pass that refreshes the run, reads it and analyses it."""
    seen = in_a_pass(lambda: shared.refreshed(before))
    loaders.analysed(scale_trace, seen)
    loaders.analysed(overview, seen)
    assert len(seen.steps) and seen.table("tensors").num_rows
    return seen


def held(run: Extract) -> int:
    """The tables and frames that a snapshot holds, and the analyses made from it."""
    return len(run._tables) + len(run._frames) + len(run._open) + len(loaders._made.get(run, (None, {}))[1])


def test_only_the_newest_snapshot_keeps_data(run: SyntheticRun, tmp_path: Path) -> None:
    shared = loaders._Shared(open_extract(tmp_path / "a"))
    seen: list[Extract] = []  # referenced by closed tabs that may come back, and by widgets
    for _ in range(30):
        seen.append(refresh_and_analyse(shared, seen[-1] if seen else None))
        run.advance(3)
    assert len({id(snapshot) for snapshot in seen}) == 30
    assert [held(snapshot) for snapshot in seen[:-1]] == [0] * 29
    assert held(seen[-1]) > 0
    gc.collect()
    others = [o for o in gc.get_objects() if isinstance(o, Extract) and o.path == tmp_path / "a" and held(o)]
    assert others == [seen[-1]]


def test_an_old_snapshot_reads_the_current_run(run: SyntheticRun, tmp_path: Path) -> None:
    shared = loaders._Shared(open_extract(tmp_path / "a"))
    old = refresh_and_analyse(shared, None)
    run.advance(5)
    refresh_and_analyse(shared, old)
    assert held(old) == 0
    assert list(old.steps["step"]) == list(range(25)) and loaders.analysed(overview, old).steps_done == 25
    run.advance(5)
    refresh_and_analyse(shared, None if old is shared._snapshot else shared._snapshot)
    assert held(old) == 0


def test_a_pass_keeps_its_snapshot(run: SyntheticRun, tmp_path: Path) -> None:
    shared = loaders._Shared(open_extract(tmp_path / "a"))
    go_on, looked = threading.Event(), threading.Event()
    result: list[int] = []

    def slow() -> None:
        seen = shared.refreshed(None)
        result.append(len(seen.steps))
        looked.set()
        go_on.wait(300)
        result.append(held(seen))
        result.append(len(seen.steps))

    thread = threading.Thread(target=slow)
    thread.start()
    assert looked.wait(300)
    run.advance(5)
    assert len(refresh_and_analyse(shared, shared._snapshot).steps) == 25
    go_on.set()
    thread.join(300)
    assert result[0] == result[2] == 20 and result[1] > 0


def test_the_files_of_a_run_are_listed_once_per_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "runs" / "a", "healthy", steps=20)
    monkeypatch.setattr(st, "session_state", {})
    entry = Entry("run/a", path, "run", "a", "finished")
    listings: list[int] = []
    ask = Extract.fingerprint
    monkeypatch.setattr(Extract, "fingerprint", lambda self: (listings.append(1), ask(self))[1])
    run = loaders.open_run(entry)
    assert [loaders.analysed(overview, run).steps_done for _ in range(5)] == [20] * 5
    loaders.analysed(scale_trace, run)
    assert len(listings) == 1
    shutil.rmtree(path)  # another run in the same place, as after an upload
    write(path, "healthy", steps=30)
    assert loaders.analysed(overview, loaders.open_run(entry)).steps_done == 30


def test_a_pinned_snapshot_does_not_change(run: SyntheticRun, tmp_path: Path) -> None:
    shared = loaders._Shared(open_extract(tmp_path / "a"))
    paused = refresh_and_analyse(shared, None)
    loaders.pin(paused)
    run.advance(5)
    assert len(refresh_and_analyse(shared, paused).steps) == 25
    assert len(paused.steps) == 20


BLOCKS = """
import ctypes, numpy as np
from pages.parts import release_memory
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usm fsm used free keep".split()]
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
release_memory.configure_allocator()
for mib in (1, 8, 16, 24):  # each, when freed, would raise the size up to which blocks come from the heap
    block = np.ones(mib * 2**20, np.uint8)
    del block
before = libc.mallinfo2().hblkhd
blocks = [np.ones(2**21, np.uint8) for _ in range(8)]  # larger than the holes that imports left
print(libc.mallinfo2().hblkhd - before, release_memory.pa.default_memory_pool().backend_name)
"""


HOLES = """
import threading, numpy as np, psutil
from pages.parts import release_memory
release_memory.configure_allocator()
kept = []
def look():
    blocks = [np.ones(2**15, np.uint8) for _ in range(2000)]  # 62 MiB
    kept.extend(blocks[::50])
threads = [threading.Thread(target=look) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
before = psutil.Process().memory_info().rss
release_memory.collect()
print((before - psutil.Process().memory_info().rss) >> 20)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks glibc's malloc")
def test_free_heap_pages_are_returned_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 90  # of 186 MiB


def test_garbage_of_many_passes_is_collected_once_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    collected = threading.Semaphore(0)
    finish = threading.Event()
    now = release_memory.collect

    def slowly() -> None:
        now()
        collected.release()
        finish.wait(300)

    monkeypatch.setattr(release_memory, "collect", slowly)
    figure = Cycle()
    freed = weakref.ref(figure)
    del figure
    try:
        release_memory.collect_soon()
        assert collected.acquire(timeout=300) and freed() is None
        for _ in range(50):
            release_memory.collect_soon()  # returns although the first collection is still running
    finally:
        finish.set()
    assert collected.acquire(timeout=300)
    assert not release_memory._asked.is_set(), "the second collection covered all of them"


class Cycle:
    """An object that only the garbage collector frees."""

    def __init__(self) -> None:
        self.own = self


def test_streamlit_does_not_collect_garbage_itself() -> None:
    config = tomllib.loads((ROOT / ".streamlit" / "config.toml").read_text())
    assert config["runner"]["postScriptGC"] is False


def test_trainings_do_not_inherit_the_server_s_heap() -> None:
    code = (
        "import os; from pages.parts import release_memory as m; m.configure_allocator()\n"
        "print(*(n in os.environ for n in m.HEAP))"
    )
    own = {name: value if name != "MALLOC_ARENA_MAX" else "3" for name, value in HEAP.items()}  # set by the user
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | own, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "False", "False", "False"]


POOL = """
import io, pyarrow as pa, pyarrow.parquet as pq, pyarrow.compute as pc
from pages.parts import release_memory
release_memory.configure_allocator()
file = io.BytesIO()
pq.write_table(pa.table({"a": range(1000), "b": ["x", "y"] * 500}), file)
rows = pq.ParquetFile(file, read_dictionary=["b"]).read_row_group(0).filter(pc.field("a") > 10).sort_by("a")
print(rows.group_by("b").aggregate([("a", "max")]).num_rows, pa.mimalloc_memory_pool().max_memory())
"""


def test_arrow_allocates_directly_from_the_system() -> None:
    done = subprocess.run(
        [sys.executable, "-c", POOL], env=os.environ | HEAP, capture_output=True, text=True, check=False
    )
    if "mimalloc" in done.stderr:
        pytest.skip("this pyarrow has no mimalloc")
    assert done.stdout.split() == ["2", "0"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks glibc's malloc")
def test_large_blocks_are_returned_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKS], capture_output=True, text=True, check=False)
    if "mallinfo2" in done.stderr:
        pytest.skip("the C library has no mallinfo2, which glibc has since 2.33")
    mapped, pool = done.stdout.split()
    assert int(mapped) >= 8 * 2**21 and pool == "system"
