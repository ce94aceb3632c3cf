"""Start, stop, list and find the processes that train; imports neither torch nor Streamlit.

    >>> job = start(TrainConfig(workload="text-gpt", precision="fp16"), "runs")
    >>> job.folder, job.state
    (PosixPath('runs/text-gpt-tiny-fp16-1'), 'starting')
    >>> [(j.name, j.state, j.queue_position) for j in listing("runs")]
    [('text-gpt-tiny-fp16-1', 'running', None)]
    >>> find(job.folder).stop().state
    'stopped'

A job is a run folder with a `job.json`, which holds all its state, so a second browser tab, a restarted app and the
command line see the same jobs and can stop them. Each device runs one job at a time; the others wait in the order of
their creation (see `launcher`).

A `Job` is a snapshot; `find(job.folder)` reads it again. `listing` and `find` also reap ended children, record the end
of jobs that could not do so themselves (`reaper`), and kill jobs that exceed their grace period after a stop request.
"""

import dataclasses
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from amp_core.hardware.child_environment import python_path
from amp_core.hardware.device_types import ACCELERATORS
from amp_core.hardware.host import this_machine
from amp_core.hardware.nvml import NvmlError
from amp_core.hardware.usable_gpus import usable_gpus
from amp_core.jobs import job_file, reaper
from amp_core.library import permissions
from amp_core.schema import RunError
from amp_core.settings.training import TrainConfig
from amp_core.store.run import load_run
from amp_core.store.sources import STALE_S, console_tail

GRACE_S = 10.0
"""How long a job may take after a stop request to end its step and write its end, seconds."""

_children: dict[Path, subprocess.Popen[bytes]] = {}  # by folder: only the parent gets the exit code
_lock = threading.RLock()  # the app's sessions are threads; held while a job.json is read, changed and replaced


@dataclass(frozen=True)
class Job:
    """A snapshot of a training process and its run folder."""

    folder: Path
    """The run folder; `load_run` reads it from the state `running` on."""
    device: str
    """The device whose queue it is in: `cpu` or `cuda:N`."""
    created_ns: int
    """Time of creation, nanoseconds since 1970."""
    state: str
    """`queued` (waits for its device), `starting` (imports, builds the model), `running`, or how it ended: `finished`,
    `stopped`, `failed`, `lost`."""
    reason: str | None
    """Why it ended, in words; while it waits, behind which job."""
    queue_position: int | None
    """The number of jobs before it in the queue of its device; None unless queued."""
    stop_requested: bool
    """Whether a stop was requested."""
    pid: int | None
    config: Mapping[str, Any]
    """The settings it was started with, as `TrainConfig.from_dict` takes them."""

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.name

    @property
    def alive(self) -> bool:
        """Whether it had not ended at the time of the snapshot."""
        return self.state in ("queued", "starting", "running")

    def console(self, lines: int = 20) -> list[str]:
        """The last lines that the process has printed until now."""
        return console_tail(self.folder / job_file.CONSOLE_FILE, lines)

    def request_stop(self, grace_s: float = GRACE_S) -> None:
        """Request that the job finishes its step and stops; returns at once. If it has not ended after `grace_s`
        seconds, the next `listing` or `find` kills it with everything that it started. A second request changes
        nothing. Raises `RunError` for a job of another machine, and on a read-only server."""
        permissions.current().check_change("stop a run")
        _await_process(self.folder)
        with _lock:
            record = job_file.read(self.folder)
            alive = job_file.is_alive(record)
            if alive is None:
                raise RunError(f"job={self.name!r} runs on another machine; stop it there")
            if not alive or record.stop_requested_s is not None:
                return
            record = dataclasses.replace(record, stop_requested_s=time.time(), stop_grace_s=grace_s)
            job_file.write(self.folder, record)  # before the signal, so that the reason is on disk when the job ends
            reaper.send_stop(record)

    def stop(self, grace_s: float = GRACE_S) -> "Job":
        """Request a stop, wait until the process has ended, and return the job then; kills it after `grace_s` seconds.

        The returned job is still alive only if SIGKILL cannot end it, as with a process inside a device driver.
        """
        self.request_stop(grace_s)
        deadline = time.monotonic() + grace_s + 5.0
        while job_file.is_alive(job_file.read(self.folder)) and time.monotonic() < deadline:
            find(self.folder)  # kills it after the grace period
            time.sleep(0.05)
        return find(self.folder)


def start(
    config: TrainConfig,
    runs_dir: str | os.PathLike[str],
    name: str | None = None,
    *,
    command: Sequence[str] | None = None,
    makes: str = "run",
) -> Job:
    """Make a run folder under `runs_dir` and start, or queue, the training of `config` in it.

    The folder is named `name`, reduced to characters that are valid in file names, or after the settings; a number is
    added if that exists. `command` replaces `ampscope train` and is called with `--config FILE --out FOLDER`; if it
    makes several runs in folders below, `makes` is `runs`. Raises `RunError` if the folder cannot be written, the
    process cannot be started, or a server's rules (`amp_core.library.permissions`) forbid it.
    """
    runs = Path(runs_dir).resolve()
    with _lock:  # so that two sessions cannot both take the last free slot
        permissions.current().check_start(config, runs, sum(1 for _, r in job_file.every(runs) if job_file.is_alive(r)))
        folder = _new_folder(runs, name, config)
    config_file = folder / job_file.CONFIG_FILE
    train = list(command) if command is not None else [sys.executable, "-m", "amp_core", "train"]
    record = job_file.Record(
        argv=(*train, "--config", str(config_file), "--out", str(folder)),
        device=device_of(config),
        created_ns=time.time_ns(),
        config=config.to_dict(),
        makes=makes,
    )
    with _lock:
        try:
            config_file.write_text(json.dumps(record.config, indent=1), encoding="utf-8")
            job_file.write(folder, record)
            with open(folder / job_file.CONSOLE_FILE, "ab") as console:
                child = subprocess.Popen(
                    [sys.executable, "-m", "amp_core.jobs.launcher", str(folder)],
                    stdin=subprocess.DEVNULL,
                    stdout=console,  # a file, not a pipe: it needs no reader, and its last lines outlive the process
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C in the app's terminal must not reach the training
                    env=os.environ | python_path() | {"PYTHONUNBUFFERED": "1"},  # unbuffered output
                )
            started_s = psutil.Process(child.pid).create_time()
            process = {"machine": this_machine(), "pid": child.pid, "started_s": started_s}
            record = dataclasses.replace(record, process=process)
            job_file.write(folder, record)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise RunError(f"runs_dir={str(runs_dir)!r} cannot hold a new job: {error.strerror or error}") from error
        _children[folder] = child
    return find(folder)


def listing(runs_dir: str | os.PathLike[str]) -> list[Job]:
    """All jobs under `runs_dir`, newest first; empty if the folder does not exist."""
    folder = Path(runs_dir).resolve()
    with _lock:
        _reap_removed()
        jobs = [(f, _upkeep(f, r)) for f, r in job_file.every(folder)]
        jobs.sort(key=lambda item: job_file.order(*item), reverse=True)
        return [_job(f, r, jobs) for f, r in jobs]


def find(folder: str | os.PathLike[str]) -> Job:
    """The job of a run folder. Raises `RunError` if it holds none."""
    where = Path(folder).resolve()
    with _lock:
        return _job(where, _upkeep(where, job_file.read(where)))


def makes_runs(folder: str | os.PathLike[str]) -> bool:
    """Whether the folder belongs to a job with several runs, such as a comparison, and is not itself a run."""
    try:
        return job_file.read(Path(folder)).makes == "runs"
    except RunError:
        return False


def folder_name(name: str) -> str:
    """`name` as `start` uses it: letters, digits, dot, dash and underscore, not beginning with a dot or dash."""
    return re.sub(r"[^\w.]+", "-", name).strip(".-_")[:60].rstrip(".-_")


def device_of(config: TrainConfig) -> str:
    """The device that `config` will train on, as far as that is known without torch: `cpu`, `cuda:N` and so on."""
    if config.device == "auto":
        return "cuda:0" if _has_cuda() else "cpu"
    return f"{config.device}:0" if config.device in ACCELERATORS else config.device


# inside


def _upkeep(folder: Path, record: job_file.Record) -> job_file.Record:
    """Reap the job if it ended, and kill it if its grace period is over."""
    alive = _alive(folder, record)
    if alive:
        if time.time() > reaper.kill_due_s(record):
            reaper.kill(record)
    elif folder in _children:
        returncode = _children[folder].wait()  # returns at once: it has ended, and this removes the zombie
        record = reaper.record_end(folder, record, returncode)
        del _children[folder]
    elif alive is False and record.ended_s is None and os.access(folder, os.W_OK):
        record = reaper.record_end(folder, record, None)
    return record


def _alive(folder: Path, record: job_file.Record) -> bool | None:
    """Whether the job's process runs; None for a job of another machine. A child of this process counts even before its
    pid is recorded, which may take long on a busy machine."""
    child = _children.get(folder)
    if record.process is None and child is not None and child.poll() is None:
        return True
    return job_file.is_alive(record)


def _reap_removed() -> None:
    """Reap ended children whose folders were removed."""
    for folder, child in list(_children.items()):
        if not (folder / job_file.JOB_FILE).exists() and child.poll() is not None:
            del _children[folder]


def _job(folder: Path, record: job_file.Record, jobs: Sequence[tuple[Path, job_file.Record]] | None = None) -> Job:
    alive = _alive(folder, record)
    if alive is False and record.ended_s is None:  # it ended after the upkeep: record how
        record = _upkeep(folder, record)
    state, reason, position = _state(folder, record, alive, jobs)
    return Job(
        folder=folder,
        device=record.device,
        created_ns=record.created_ns,
        state=state,
        reason=reason,
        queue_position=position,
        stop_requested=record.stop_requested_s is not None,
        pid=record.pid,
        config=record.config,
    )


def _state(
    folder: Path, record: job_file.Record, alive: bool | None, jobs: Sequence[tuple[Path, job_file.Record]] | None
) -> tuple[str, str | None, int | None]:
    if (folder / "run.json").exists():
        try:
            run = load_run(folder)
        except RunError as error:
            return "failed", str(error), None
        # If the process is alive, the lost run is that of an earlier writer: trust the process.
        return ("running" if run.status == "lost" and alive else run.status), run.end_reason, None
    if alive is None:  # on another machine: judge by its files
        fresh = time.time() - record.created_ns / 1e9 < STALE_S
        return (
            ("starting", None, None) if fresh else ("lost", "it runs on another machine, which does not report", None)
        )
    if not alive:
        return *reaper.end_of_job(folder, record), None
    ahead = job_file.ahead_of(folder, record, jobs)
    if ahead:
        return "queued", f"waiting for {record.device}: behind {ahead[-1][0]}", len(ahead)
    return ("running" if record.makes == "runs" else "starting"), None, None


def _await_process(folder: Path) -> None:
    """Wait until the record names the job's process, which another program may be about to write."""
    while (record := job_file.read(folder)).process is None and job_file.is_alive(record):
        time.sleep(0.02)


def _new_folder(runs_dir: Path, name: str | None, config: TrainConfig) -> Path:
    given = folder_name(name) if name is not None else ""
    base = given or folder_name(f"{config.task}-{config.precision}")
    numbers = itertools.count(2 if given else 1)
    folder = runs_dir / (given or f"{base}-{next(numbers)}")
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                folder.mkdir()
                return folder
            except FileExistsError:  # it exists; another session may just have created it
                folder = runs_dir / f"{base}-{next(numbers)}"
    except OSError as error:
        raise RunError(f"runs_dir={str(runs_dir)!r} cannot be written: {error.strerror or error}") from error


def _has_cuda() -> bool:
    """Whether torch will find a CUDA device, without importing torch here."""
    try:
        if "+cpu" in metadata.version("torch"):
            return False
        return bool(usable_gpus())
    except (metadata.PackageNotFoundError, NvmlError):  # no torch; neither a driver nor a GPU that torch finds
        return False
