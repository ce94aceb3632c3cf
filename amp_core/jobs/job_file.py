"""`job.json`: the record of a training process that was started for a run folder.

    >>> record = read(Path("runs/text-gpt-tiny-fp16-1"))
    >>> record.device, is_alive(record), [name for name, _ in ahead_of(folder, record)]
    ('cpu', True, ['digits-cnn-tiny-fp32-1'])

`queue` writes it in the app, `launcher` reads it in the waiting process. The queue consists of these files alone: a job
waits while an earlier job of the same device is alive.
"""

import dataclasses
import functools
import json
import os
import re
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from amp_core.hardware.host import process_alive
from amp_core.schema import RunError
from amp_core.store.atomic import replace_file
from amp_core.store.sightings import SIGHTINGS

JOB_FILE = "job.json"
CONFIG_FILE = "config.json"
CONSOLE_FILE = "console.log"
SCRIPT_FILE = "job.sh"
LOG_FILE = "job.log"
ARRAY_FILE = "array.json"
"""In a folder whose subfolders are the runs of an array: the names of these, in the order of the comparison."""

lock = threading.RLock()
"""Held while a `job.json` is read, changed and replaced: the app's sessions are threads."""

changes = 0
"""How many times this process has written a `job.json`: what was listed before the last one is out of date."""

_PLAIN = re.compile(r"\w[\w.-]*")
"""Names of folders that lead nowhere else."""

MAX_CACHED = 20_000
"""Records that are kept until their file changes."""

STARTING_S = 10.0
"""How long a job without a recorded process counts as alive: its parent may not have recorded it yet."""


@dataclass(frozen=True)
class Record:
    """The content of one `job.json`."""

    argv: tuple[str, ...]
    """The training command, as an argument list."""
    device: str
    """The queue it is in: `cpu` or `cuda:N` here, a label such as `slurm:gpu` for a scheduler's."""
    created_ns: int
    """Time of creation, nanoseconds since 1970: its position in the queue."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The settings it trains with."""
    process: Mapping[str, Any] | None = None
    """Machine, pid and start time, as from `this_process`; None before the start."""
    stop_requested_s: float | None = None
    """Time of the stop request, seconds since 1970."""
    stop_grace_s: float = 10.0
    """Seconds from the stop request until the job is killed."""
    ended_s: float | None = None
    """When its process was first observed to have ended, seconds since 1970."""
    returncode: int | None = None
    """Exit code, or minus the signal; None if no parent observed the end."""
    makes: str = "run"
    """`run`: the folder becomes a run; `runs`: a comparison or a search, whose runs lie in subfolders."""
    backend: str = "local"
    """Name of the backend that runs it: a key of `backends.BACKENDS`."""
    resources: Mapping[str, Any] = field(default_factory=dict)
    """What it requests from a scheduler: a `Resources` as a dictionary."""
    token: str | None = None
    """Part of the job's name in the scheduler, unique, written before it is submitted: finds a job whose id could not
    be recorded."""
    backend_id: str | None = None
    """The scheduler's id of the job; None until the submission is confirmed."""
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    """How the scheduler says that the job ended: `state`, `cause`, `reason`, `node` and others; empty before."""

    @property
    def pid(self) -> int | None:
        """The process id, if one is recorded."""
        return None if self.process is None else int(self.process["pid"])


_TYPES: dict[str, tuple[type, ...]] = {
    "argv": (list,),
    "device": (str,),
    "created_ns": (int,),
    "config": (dict,),
    "process": (dict, type(None)),
    "stop_requested_s": (int, float, type(None)),
    "stop_grace_s": (int, float),
    "ended_s": (int, float, type(None)),
    "returncode": (int, type(None)),
    "makes": (str,),
    "backend": (str,),
    "resources": (dict,),
    "token": (str, type(None)),
    "backend_id": (str, type(None)),
    "scheduler": (dict,),
}


def read(folder: Path) -> Record:
    """The record of the job in `folder`. Raises `RunError` if there is none, or it cannot be read."""
    file = folder / JOB_FILE
    try:
        values = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise RunError(f"folder={str(folder)!r} holds no job: {JOB_FILE} is missing") from None
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise RunError(f"{file} is damaged: it does not hold JSON") from None
    if not isinstance(values, dict):
        raise RunError(f"{file} is damaged: it holds a JSON {type(values).__name__}, not an object")
    known = {name: values[name] for name in _TYPES if name in values}
    for name in ("argv", "device", "created_ns"):
        if name not in known:
            raise RunError(f"{file} is damaged: {name} is missing")
    for name, value in known.items():
        if not isinstance(value, _TYPES[name]) or isinstance(value, bool):
            raise RunError(f"{file} is damaged: {name}={value!r:.80}")
    process = known.get("process")
    if process is not None and (not isinstance(process.get("pid"), int) or process["pid"] <= 1):
        raise RunError(f"{file} is damaged: process={process!r:.80} is not a valid process")
    return Record(**known | {"argv": tuple(str(a) for a in known["argv"])})


def write(folder: Path, record: Record) -> None:
    """Replace `job.json` as a whole."""
    global changes
    replace_file(folder / JOB_FILE, json.dumps(dataclasses.asdict(record), indent=1).encode())
    changes += 1


def every(runs_dir: Path) -> Iterator[tuple[Path, Record]]:
    """All jobs under `runs_dir`, in no order, those of arrays included; folders without a readable `job.json` are
    skipped."""
    try:
        with os.scandir(runs_dir) as entries:
            names = [e.name for e in entries]
    except OSError:  # no such folder yet, so no jobs
        return
    for name in names:
        # Few of thousands of runs were started by a job, and creating a Path for each is slower than this check.
        folder = f"{runs_dir}/{name}"
        if (record := _record_in(folder)) is not None:
            yield runs_dir / name, record
            continue
        for task in _names_in(f"{folder}/{ARRAY_FILE}"):
            if (record := _record_in(f"{folder}/{task}")) is not None:
                yield runs_dir / name / task, record


def _record_in(folder: str) -> Record | None:
    """The record of a job; None if there is no job, it was removed after it was listed, or it is not AMPscope's."""
    try:
        info = os.stat(f"{folder}/{JOB_FILE}")  # noqa: PTH116
        if stat.S_ISREG(info.st_mode):
            return _read_version(folder, info.st_ino, info.st_mtime_ns, info.st_size)
    except (OSError, RunError):
        pass
    return None


def write_array(folder: Path, names: Sequence[str]) -> None:
    """Note that the subfolders `names` of `folder` are the runs of an array."""
    replace_file(folder / ARRAY_FILE, json.dumps(list(names)).encode())


def array_in(folder: Path) -> tuple[str, ...]:
    """The names of the subfolders that are the runs of an array; none if `folder` holds no array."""
    return _names_in(f"{folder}/{ARRAY_FILE}")


def _names_in(file: str) -> tuple[str, ...]:
    if not os.access(file, os.F_OK):  # nearly always: faster than the error of `open`
        return ()
    try:
        with open(file, "rb") as content:
            names = json.load(content)
    except (OSError, ValueError, RecursionError):  # removed meanwhile, or not written by AMPscope
        return ()
    plain = isinstance(names, list) and all(isinstance(name, str) and _PLAIN.fullmatch(name) for name in names)
    return tuple(names) if plain else ()


@functools.lru_cache(maxsize=MAX_CACHED)
def _read_version(folder: str, _inode: int, _mtime_ns: int, _size: int) -> Record:
    """`read`, once for each version of the file: it is only ever replaced as a whole."""
    return read(Path(folder))


def is_alive(record: Record) -> bool | None:
    """Whether the job's process runs, or a scheduler's job has no recorded end; None for a job of another machine."""
    if record.backend != "local":
        return record.ended_s is None
    if record.process is None:
        created = (("", 0, record.created_ns),)
        return SIGHTINGS.changed_lately(f"{record.created_ns} starting", created, STARTING_S)
    return process_alive(record.process)


def order(folder: Path, record: Record) -> tuple[int, str]:
    """Sort key of the queue."""
    return record.created_ns, folder.name


class Living(NamedTuple):
    """A job that waits or runs."""

    folder: Path
    record: Record
    begun: bool
    """Whether it trains already: it then goes first, even if its time is later, since the clock may have been set
    back."""


def living(jobs: Iterable[tuple[Path, Record]]) -> list[Living]:
    """Those of `jobs` that are alive on this machine, in the order in which they were made."""
    alive = [(folder, record) for folder, record in jobs if record.backend == "local" and is_alive(record)]
    return [Living(f, r, (f / "run.json").exists()) for f, r in sorted(alive, key=lambda job: order(*job))]


def ahead_of(folder: Path, record: Record, others: Iterable[Living] | None = None) -> list[tuple[str, Record]]:
    """Names and records of the living jobs that the job in `folder` waits for, in the order of the queue.

    `others` are the living jobs of this machine in the runs directory, if the caller has looked for them already.
    """
    mine = order(folder, record)
    return [
        (other.folder.name, other.record)
        for other in (living(every(folder.parent)) if others is None else others)
        if other.record.device == record.device
        and other.folder.name != folder.name
        and (other.begun or order(other.folder, other.record) < mine)
    ]
