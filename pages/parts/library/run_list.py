"""Which runs there are: samples that came with AMPscope, own runs, uploads, jobs that have not begun to write yet, and
runs in other places that `AMPSCOPE_RUNS` lists, be they folders or addresses such as s3://bucket/runs.

    >>> entries = listing()
    >>> entries["sample/fp16-healthy"].path

A key such as `run/2026-01-01-text-gpt` comes from an address bar, so it is only ever looked up in the listing and never
joined to a path. A folder that cannot be read is listed with the sentence that says why.
"""

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from amp_core import RunError, jobs, load_run
from amp_core.library.labels import Label, label_file, label_of
from amp_core.library.permissions import folder_bytes
from amp_core.schema import TABLES, Head
from amp_core.store.urls import Address, roots
from amp_core.tune.result import FILE as SEARCH_FILE
from pages.parts.library import remote_runs

SAMPLES = Path(__file__).resolve().parents[3] / "sample_runs"
"""Runs that come with AMPscope."""

UPLOADS = "uploads"
"""Folder of the runs directory into which uploads are unpacked."""

SEARCH_DEPTH = 2
"""Levels of folders between the folder of a search and its runs: stage and recipe."""

MAX_ENTRIES = 20_000
"""At most this many folders are read: a runs directory set to something else must not block the app."""


@dataclass(frozen=True)
class Entry:
    """One run in the library."""

    key: str
    path: Path | Address
    origin: str
    """`sample`, `run`, `upload`, or `elsewhere` for a run outside the runs directory."""
    name: str
    status: str
    """`queued`, `starting`, `running`, `finished`, `stopped`, `failed`, `lost` or `damaged`."""
    created_at: str = ""
    config: Mapping[str, Any] | None = None
    sentence: str = ""
    """Why a damaged run cannot be opened, without its path on the server; for what a queued one waits."""
    tags: tuple[str, ...] = ()
    note: str = ""
    """The note in its label."""

    @property
    def readable(self) -> bool:
        """Whether there is a run to open: neither damaged nor still waiting for its process."""
        return self.status not in ("damaged", "queued", "starting")

    @property
    def under_way(self) -> bool:
        """Whether its process may still change it."""
        return self.status in ("queued", "starting", "running")

    @property
    def group(self) -> str:
        """The folder that it shares with runs made together with it, as by `ampscope compare` or `tune`; else empty."""
        parts = self.key.split("/")
        return parts[1] if len(parts) > 2 and self.origin in ("sample", "run") else ""

    @property
    def mine(self) -> bool:
        """Whether the app may delete it."""
        return self.origin in ("run", "upload")


def runs_dir() -> Path:
    """The runs directory: the first folder in the environment variable AMPSCOPE_RUNS, or `runs` in the working
    directory. Runs that the app starts and uploads go there."""
    return next((root for root in _listed_roots() if isinstance(root, Path)), Path("runs"))


def name_of(job: jobs.Job, root: Path | None = None) -> str:
    """A job's name on pages, and its run's key without `run/`: the name of its folder, after that of the folder that
    it shares with the other runs of its array, if there is one. `root` is the runs directory, resolved."""
    in_group = job.folder.parent.parent == (runs_dir().resolve() if root is None else root)
    return f"{job.folder.parent.name}/{job.name}" if in_group else job.name


def other_roots() -> dict[str, Path | Address]:
    """The other places in AMPSCOPE_RUNS, by the prefix of their runs' keys: the place's name."""
    own = runs_dir()
    listed: dict[str, Path | Address] = {}
    for root in _listed_roots():
        if root == own or root in listed.values():
            continue
        name = re.sub(r"[^\w.\-]+", "-", root.name).strip("-.") or "root"
        taken = {"sample", "run", *listed}
        listed[next(n for n in (name, *(f"{name}-{i}" for i in range(2, len(taken) + 3))) if n not in taken)] = root
    return listed


def _listed_roots() -> list[Path | Address]:
    return roots(os.environ.get("AMPSCOPE_RUNS", ""))


def listing() -> dict[str, Entry]:
    """All runs by key: own runs and uploads, then those of other places, each newest first; then the samples."""
    samples = [_entry(path, key, "sample", dotted) for path, key, dotted in folders(SAMPLES, "sample")]
    own_dir = runs_dir()
    root = own_dir.resolve()
    pending = {f"run/{name_of(job, root)}": job for job in jobs.under_way(own_dir) if _is_pending(job)}
    own = [
        Entry(key, own_dir / key.removeprefix("run/"), "run", job.name, job.state, sentence=job.reason or "")
        for key, job in pending.items()
    ]
    for path, key, dotted in folders(own_dir, "run", leave_out=pending):
        origin = "upload" if key.startswith(f"run/{UPLOADS}/") else "run"
        own.append(_entry(path, key, origin, dotted))
    own += _unlisted(own_dir, "run")
    others = [e for name, root in other_roots().items() for e in _newest_first(_elsewhere(name, root))]
    return {e.key: e for e in (*_newest_first(own), *others, *samples)}


def _is_pending(job: jobs.Job) -> bool:
    """Whether the job's run is not there yet. A scheduler's job may wait again after it has begun: it is queued,
    whatever its run says."""
    if job.makes_runs or job.state not in ("queued", "starting"):
        return False
    return job.backend != "local" or not (job.folder / "run.json").is_file()


def _newest_first(entries: list[Entry]) -> list[Entry]:
    """Runs of one group stay together, at the position of the newest."""
    made = {e.key: "9" if e.under_way else e.created_at for e in entries}
    newest: dict[str, str] = {}
    for e in entries:
        newest[e.group] = max(newest.get(e.group, ""), made[e.key])
    return sorted(
        entries,
        key=lambda e: (newest[e.group] if e.group else made[e.key], e.group, made[e.key], e.name),
        reverse=True,
    )


def _elsewhere(name: str, root: Path | Address) -> list[Entry]:
    """The runs of another place; if it cannot be listed, one entry that says why."""
    if isinstance(root, Path):
        entries = [_entry(path, key, "elsewhere", dotted) for path, key, dotted in folders(root, name)]
        return entries + _unlisted(root, name)
    try:
        listed = remote_runs.runs_at(root)
    except RunError as error:
        return [Entry(name, root, "elsewhere", str(root), "damaged", sentence=str(error))]
    entries = []
    for run in listed:
        key = f"{name}/{str(run.path).removeprefix(str(root)).lstrip('/')}"
        if run.head is None:
            entries.append(Entry(key, run.path, "elsewhere", run.path.name, "damaged", sentence=run.sentence))
        else:
            head = run.head
            shown_name = head.name or run.path.name
            entries.append(Entry(key, run.path, "elsewhere", shown_name, run.status, head.created_at, head.config))
    return entries


def _unlisted(root: Path, key: str) -> list[Entry]:
    """One entry that says why a place cannot be listed; none if it can, or does not exist."""
    try:
        os.scandir(root).close()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        sentence = f"the folder {root.name} cannot be read: {error.strerror or error}"
        return [Entry(key, root, "elsewhere", root.name, "damaged", sentence=sentence)]
    return []


def key_of(entries: Mapping[str, Entry], asked: str) -> str | None:
    """The key of the run that an address asks for; of an own run, its name alone will do. None if there is none."""
    return next((key for key in (asked, f"run/{asked}") if key in entries), None)


def preferred(entries: Mapping[str, Entry]) -> str | None:
    """The key to open by default: the newest run that is no sample, else a healthy FP16 sample, else any sample."""

    def rank(entry: Entry) -> tuple[bool, bool, bool]:
        if entry.origin != "sample":
            return (False, False, False)
        precision = (entry.config or {}).get("precision")
        return (True, precision != "fp16", "healthy" not in entry.key)

    ended = [e for e in entries.values() if e.readable and not e.under_way]
    return min(ended, key=rank).key if ended else None


def folders(
    root: Path, prefix: str, deeper: int = 1, leave_out: Collection[str] = ()
) -> Iterator[tuple[Path, str, Collection[str]]]:
    """Folders below `root` that are runs or look like one: also one level deeper, as `ampscope compare` lays them out,
    and further down in the folder of a search, as `ampscope tune` does. Yields each with its key and the hidden names
    beside it. Folders whose keys are in `leave_out` are not looked at."""
    names, dotted = _subfolders(root)
    for name in names:
        path, key = root / name, f"{prefix}/{name}"
        if key in leave_out:
            continue
        if _is_run(path):
            yield path, key, dotted
        elif deeper:
            below = SEARCH_DEPTH if is_search(path) else deeper - 1
            yield from folders(path, key, below, leave_out)


def is_search(path: Path) -> bool:
    """Whether a folder was made by `ampscope tune`, with the runs of its search below it."""
    try:
        return (path / SEARCH_FILE).is_file()
    except OSError:  # not readable
        return False


def _subfolders(path: Path) -> tuple[list[str], set[str]]:
    """Names of the folders in `path`, and all hidden names in it."""
    try:
        with os.scandir(path) as listed:
            every = list(listed)
    except OSError:  # missing or not readable: it has no runs
        return [], set()
    dotted = {e.name for e in every if e.name.startswith(".")}
    return sorted(e.name for e in every if e.name not in dotted and _is_folder(e))[:MAX_ENTRIES], dotted


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder; a link whose target may not be seen counts as one, and is listed with the reason."""
    try:
        return entry.is_dir()
    except OSError:
        return True


def _is_run(path: Path) -> bool:
    try:
        with os.scandir(path) as listed:
            names = {e.name for e in listed}
    except PermissionError:  # listed with the reason: it may be a run
        return True
    except OSError:
        return False
    if "run.json" in names:
        return True
    return not jobs.makes_runs(path) if "job.json" in names else len(names & TABLES.keys()) > 1


def _entry(path: Path, key: str, origin: str, dotted: Collection[str]) -> Entry:
    """The entry of a folder; `dotted` are the hidden names beside it, since few of thousands of runs have a label."""
    try:
        info = (path / "run.json").stat()
        head = _head(str(path), info.st_mtime_ns, info.st_size)
        status = load_run(path).status if head.status == "running" else head.status
    except FileNotFoundError:
        return _damaged(path, key, origin, "its folder holds no run: run.json is missing")
    except OSError as error:
        return _damaged(path, key, origin, f"{path.name} cannot be read: {error.strerror or error}")
    except RunError as error:
        return _damaged(path, key, origin, str(error).replace(f"{path.parent}{os.sep}", ""))
    label = label_of(path) if dotted and label_file(path).name in dotted else Label()
    name = label.name or head.name or path.name
    return Entry(key, path, origin, name, status, head.created_at, head.config, tags=label.tags, note=label.note)


def _damaged(path: Path, key: str, origin: str, sentence: str) -> Entry:
    return Entry(key, path, origin, path.name, "damaged", sentence=sentence)


@lru_cache(maxsize=MAX_ENTRIES)
def _head(path: str, _mtime_ns: int, _size: int) -> Head:
    return load_run(path).head


def size_bytes(path: Path | Address) -> int:
    """Bytes that the run occupies on this machine."""
    return 0 if isinstance(path, Address) else folder_bytes(path)
