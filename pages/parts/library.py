"""Which runs there are: samples that came with AMPscope, own runs, uploads, and jobs that have not begun to write yet.

    >>> entries = listing()
    >>> entries["sample/fp16-healthy"].path

A key such as `run/2026-01-01-text-gpt` comes from an address bar, so it is only ever looked up in the listing and never
joined to a path. A folder that cannot be read is listed with the sentence that says why.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from amp_core import RunError, jobs, load_run
from amp_core.schema import TABLES, Head

SAMPLES = Path(__file__).resolve().parents[2] / "sample_runs"
"""Runs that come with AMPscope."""

UPLOADS = "uploads"
"""Folder of the runs directory into which uploads are unpacked."""

MOST = 2000
"""So many folders are looked at; a runs directory pointed at something else must not hang the app."""


@dataclass(frozen=True)
class Entry:
    """One run in the library."""

    key: str
    path: Path
    origin: str
    """`sample`, `run` or `upload`."""
    name: str
    status: str
    """`queued`, `starting`, `running`, `finished`, `stopped`, `failed`, `lost` or `damaged`."""
    created_at: str = ""
    config: Mapping[str, Any] | None = None
    sentence: str = ""
    """Why a damaged run cannot be opened."""

    @property
    def readable(self) -> bool:
        """Whether there is a run to open: neither damaged nor still waiting for its process."""
        return self.status not in ("damaged", "queued", "starting")

    @property
    def under_way(self) -> bool:
        """Whether it will still change by itself."""
        return self.status in ("queued", "starting", "running")

    @property
    def mine(self) -> bool:
        """Whether it may be deleted from the app."""
        return self.origin != "sample"


def runs_dir() -> Path:
    """Where own runs lie: the environment variable AMPSCOPE_RUNS, or `runs` in the working directory."""
    return Path(os.environ.get("AMPSCOPE_RUNS") or "runs")


def listing() -> dict[str, Entry]:
    """All runs by key: samples by name, then own runs and uploads, newest first."""
    samples = [_entry(path, key, "sample") for path, key in _folders(SAMPLES, "sample")]
    own_dir = runs_dir()
    pending = {job.folder.name: job.state for job in jobs.listing(own_dir) if job.state in ("queued", "starting")}
    own = []
    for path, key in _folders(own_dir, "run"):
        origin = "upload" if key.startswith(f"run/{UPLOADS}/") else "run"
        if (path / "run.json").is_file() or path.name not in pending:
            own.append(_entry(path, key, origin))
        else:
            own.append(Entry(key, path, origin, path.name, pending[path.name]))
    own.sort(key=lambda e: ("9" if e.under_way else e.created_at, e.name), reverse=True)
    return {e.key: e for e in (*samples, *own)}


def preferred(entries: Mapping[str, Entry]) -> str | None:
    """The key to open when nobody has chosen: a healthy FP16 sample, else any sample, else the newest run."""

    def rank(entry: Entry) -> tuple[bool, bool, bool]:
        precision = (entry.config or {}).get("precision")
        return (entry.origin != "sample", precision != "fp16", "healthy" not in entry.key)

    ended = [e for e in entries.values() if e.readable and not e.under_way]
    return min(ended, key=rank).key if ended else None


def _folders(root: Path, prefix: str) -> Iterator[tuple[Path, str]]:
    """Folders below `root` that are runs or claim to be, also one level deeper, as `ampscope compare` lays them."""
    for path in _subfolders(root):
        if _is_run(path):
            yield path, f"{prefix}/{path.name}"
        else:
            for inner in _subfolders(path):
                if _is_run(inner):
                    yield inner, f"{prefix}/{path.name}/{inner.name}"


def _subfolders(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as found:
            names = sorted(e.name for e in found if e.is_dir() and not e.name.startswith("."))
    except OSError:  # no such folder yet, or not ours to read: then it holds no runs
        return []
    return [path / name for name in names[:MOST]]


def _is_run(path: Path) -> bool:
    try:
        names = {p.name for p in path.iterdir()}
    except OSError:
        return False
    return bool(names & {"run.json", "job.json"}) or len(names & TABLES.keys()) > 1


def _entry(path: Path, key: str, origin: str) -> Entry:
    try:
        info = (path / "run.json").stat()
        head = _head(str(path), info.st_mtime_ns, info.st_size)
        status = load_run(path).status if head.status == "running" else head.status
    except FileNotFoundError:
        return _damaged(path, key, origin, "its folder holds no run: run.json is missing")
    except (RunError, OSError) as error:
        return _damaged(path, key, origin, str(error))
    return Entry(key, path, origin, head.name or path.name, status, head.created_at, head.config)


def _damaged(path: Path, key: str, origin: str, sentence: str) -> Entry:
    return Entry(key, path, origin, path.name, "damaged", sentence=sentence)


@lru_cache(maxsize=4096)
def _head(path: str, _mtime_ns: int, _size: int) -> Head:
    return load_run(path).head


def size_bytes(path: Path) -> int:
    """Bytes of the run's files: those directly in its folder and in its tables' folders."""
    total = 0
    for folder in (path, *_subfolders(path)):
        try:
            with os.scandir(folder) as found:
                total += sum(e.stat(follow_symlinks=False).st_size for e in found if e.is_file(follow_symlinks=False))
        except OSError:  # removed or sealed while we looked; the next look gets it right
            continue
    return total
