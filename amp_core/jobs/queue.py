"""Start, stop, list and find the jobs that train; imports neither torch nor Streamlit.

    >>> job = start(TrainConfig(workload="text-gpt", precision="fp16"), "runs")
    >>> job.folder, job.state
    (PosixPath('runs/text-gpt-tiny-fp16-1'), 'starting')
    >>> [(j.name, j.state, j.queue_position) for j in listing("runs")]
    [('text-gpt-tiny-fp16-1', 'running', None)]
    >>> find(job.folder).stop().state
    'stopped'

A job is a run folder with a `job.json`, which holds all its state, so a second browser tab, a restarted app and the
command line see the same jobs and can stop them. Where it runs is its backend's affair (`backends`): a process of this
machine, or a job of a scheduler.

A `Job` is a snapshot; `find(job.folder)` reads it again. `listing` and `find` also record the end of jobs that could
not do so themselves (`reaper`).
"""

import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amp_core.jobs import job_file, reaper
from amp_core.jobs.backends import by_name
from amp_core.jobs.backends.base import Observed
from amp_core.jobs.backends.local import device_of, reap_removed
from amp_core.jobs.backends.scheduler import UnconfirmedError
from amp_core.jobs.new_job import LOCAL, TRAIN, folder_name, new_folder, new_record
from amp_core.library import permissions
from amp_core.schema import RunError
from amp_core.settings.resources import Resources
from amp_core.settings.training import TrainConfig
from amp_core.store.atomic import replace_file
from amp_core.store.run import load_run
from amp_core.store.sightings import SIGHTINGS
from amp_core.store.sources import STALE_S

__all__ = [
    "GRACE_S",
    "Job",
    "device_of",
    "find",
    "folder_name",
    "listing",
    "makes_runs",
    "start",
    "submit_in",
    "under_way",
]

GRACE_S = 10.0
"""How long a job may take after a stop request to end its step and write its end, seconds."""

SHARED_S = 0.5
"""How long all sessions show the same list of the jobs under way."""


@dataclass(frozen=True)
class Job:
    """A snapshot of a training process and its run folder."""

    folder: Path
    """The run folder; `load_run` reads it from the state `running` on."""
    device: str
    """The queue it is in: `cpu` or `cuda:N` here, `slurm:PARTITION` and the like elsewhere."""
    created_ns: int
    """Time of creation, nanoseconds since 1970."""
    state: str
    """`queued` (waits for its device), `starting` (imports, builds the model), `running`, or how it ended: `finished`,
    `stopped`, `failed`, `lost`."""
    reason: str | None
    """Why it ended, in words; while it waits, for what; else what makes its state uncertain."""
    queue_position: int | None
    """The number of jobs before it in the queue of its device; None unless queued."""
    stop_requested: bool
    """Whether a stop was requested."""
    pid: int | None
    config: Mapping[str, Any]
    """The settings it was started with, as `TrainConfig.from_dict` takes them."""
    backend: str = "local"
    """Where it runs: `local`, `slurm`, …"""
    backend_id: str | None = None
    """The scheduler's id of the job."""
    node: str | None = None
    """The scheduler's node that it runs on."""
    makes_runs: bool = False
    """Whether its runs lie in subfolders, as those of a comparison, and its folder is not itself a run."""

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
        return by_name(self.backend).output(self.folder, lines)

    def request_stop(self, grace_s: float = GRACE_S) -> None:
        """Request that the job finishes its step and stops; returns at once. If a process of this machine has not ended
        after `grace_s` seconds, the next `listing` or `find` kills it with everything that it started; a scheduler has
        a grace period of its own. A second request changes nothing. Raises `RunError` for a job of another machine or
        another user, if the scheduler refuses, and on a read-only server."""
        permissions.current().check_change("stop a run")
        try:
            by_name(self.backend).request_stop(self.folder, grace_s)
        except OSError as error:
            raise RunError(f"job={self.name!r} cannot be stopped from here: {error.strerror or error}") from error

    def stop(self, grace_s: float = GRACE_S) -> "Job":
        """Request a stop, wait until the process has ended, and return the job then; kills it after `grace_s` seconds.

        The returned job is still alive only if SIGKILL cannot end it, as with a process inside a device driver.
        """
        self.request_stop(grace_s)
        deadline = time.monotonic() + grace_s + 5.0
        while job_file.read(self.folder).ended_s is None and time.monotonic() < deadline:
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
    resources: Resources = LOCAL,
) -> Job:
    """Make a run folder under `runs_dir` and start, or queue, the training of `config` in it.

    `name` becomes the folder's name, with a number appended if it is taken; by default workload, precision and a
    number. `command` replaces `ampscope train`: it is called with `--config FILE --out FOLDER`, like that. `makes` is
    `runs` for a command whose runs lie in subfolders. `resources` say where it runs. Raises `RunError` if the folder
    cannot be made, if the job is refused, or if it is not allowed here (`permissions`).
    """
    runs = Path(runs_dir).resolve()
    with job_file.lock:  # so that two sessions do not both take the last place
        permissions.current().check_start(config, runs, sum(1 for _, r in job_file.every(runs) if job_file.is_alive(r)))
        folder = new_folder(runs, name, config)
    train = list(command) if command is not None else TRAIN
    try:
        _submit(folder, config, config.to_dict(), train, makes, resources)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise RunError(f"runs_dir={str(runs_dir)!r} cannot hold a new job: {error.strerror or error}") from error
    except UnconfirmedError:
        raise
    except RunError:  # it was refused
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return find(folder)


def submit_in(
    folder: str | os.PathLike[str],
    config: TrainConfig,
    values: Mapping[str, Any],
    command: Sequence[str],
    *,
    makes: str = "run",
    resources: Resources,
) -> Job:
    """Submit the training of `config` in a given folder, which may hold an ended run that the command resumes.

    `values` are the settings in the command's `--config` file; it also gets `--out FOLDER`. For the command line:
    `start` is for the app, with its permissions. Raises `RunError` as `start` does, and if a job of that folder has not
    ended.
    """
    where = Path(folder).resolve()
    if (where / job_file.JOB_FILE).exists() and find(where).alive:
        raise RunError(f"out={str(folder)!r} belongs to a job that has not ended; stop it, or give another folder")
    record = where / job_file.JOB_FILE
    before = record.read_bytes() if record.exists() else None
    existed = where.exists()
    try:
        where.mkdir(parents=True, exist_ok=True)
        _submit(where, config, values, command, makes, resources)
    except OSError as error:
        raise RunError(f"out={str(folder)!r} cannot hold a job: {error.strerror or error}") from error
    except UnconfirmedError:
        raise
    except RunError:
        if not existed:
            shutil.rmtree(where, ignore_errors=True)
        elif before is not None:
            replace_file(record, before)
        else:
            record.unlink(missing_ok=True)
        raise
    return find(where)


def listing(runs_dir: str | os.PathLike[str]) -> list[Job]:
    """All jobs under `runs_dir`, newest first; empty if the folder does not exist."""
    with job_file.lock:
        return _listed(job_file.every(Path(runs_dir).resolve()))


def under_way(runs_dir: str | os.PathLike[str]) -> Sequence[Job]:
    """The jobs under `runs_dir` that wait or run, newest first, as they were up to `SHARED_S` ago.

    For pages: they are listed once for all sessions of this process. What was started or stopped by this process is
    always in it.
    """
    global _shared
    folder = Path(runs_dir).resolve()
    with job_file.lock:
        of, changes, until_s, jobs = _shared
        if of != folder or changes != job_file.changes or time.monotonic() > until_s:
            jobs = [job for job in _listed(j for j in job_file.every(folder) if j[1].ended_s is None) if job.alive]
            _shared = folder, job_file.changes, time.monotonic() + SHARED_S, jobs
        return jobs


def find(folder: str | os.PathLike[str]) -> Job:
    """The job of a run folder. Raises `RunError` if it holds none."""
    where = Path(folder).resolve()
    with job_file.lock:
        return _job(where, _upkeep(where, job_file.read(where)))


def makes_runs(folder: str | os.PathLike[str]) -> bool:
    """Whether the folder belongs to a job with several runs, such as a comparison, and is not itself a run."""
    try:
        return job_file.read(Path(folder)).makes == "runs"
    except RunError:
        return False


# inside

_shared: tuple[Path | None, int, float, Sequence[Job]] = (None, 0, 0.0, ())
"""The last answer of `under_way`: its folder, `job_file.changes` at that time, until when it holds, the jobs."""


def _listed(jobs: Iterable[tuple[Path, job_file.Record]]) -> list[Job]:
    reap_removed()
    kept = [(f, _upkeep(f, r)) for f, r in jobs]
    kept.sort(key=lambda item: job_file.order(*item), reverse=True)
    living = job_file.living(kept)
    return [_job(f, r, living) for f, r in kept]


def _submit(
    folder: Path,
    config: TrainConfig,
    values: Mapping[str, Any],
    command: Sequence[str],
    makes: str,
    resources: Resources,
) -> None:
    if makes == "runs":
        for name, alone in (("requeue", False), ("nodes", 1)):
            if (value := getattr(resources, name)) != alone:
                raise RunError(
                    f"{name}={value!r} applies to single trainings and the tasks of an array, not to interleaved "
                    "comparisons or searches; leave it out"
                )
    by_name(resources.on).submit(folder, new_record(folder, config, values, command, makes, resources))


def _upkeep(folder: Path, record: job_file.Record) -> job_file.Record:
    try:
        return by_name(record.backend).upkeep(folder, record)
    except OSError:  # the folder is another user's, or its disk is full: whoever can write it records the end
        return record


def _job(folder: Path, record: job_file.Record, living: Sequence[job_file.Living] | None = None) -> Job:
    observed = by_name(record.backend).observe(folder, record, living)
    if observed.alive is False and record.ended_s is None:  # it ended after the upkeep: record how
        record = _upkeep(folder, record)
    state, reason = _state(folder, record, observed)
    return Job(
        folder=folder,
        device=record.device,
        created_ns=record.created_ns,
        state=state,
        reason=reason,
        queue_position=observed.position if state == "queued" else None,
        stop_requested=record.stop_requested_s is not None,
        pid=record.pid,
        config=record.config,
        backend=record.backend,
        backend_id=record.backend_id,
        node=observed.node,
        makes_runs=record.makes == "runs",
    )


def _state(folder: Path, record: job_file.Record, observed: Observed) -> tuple[str, str | None]:
    if observed.waiting is not None:
        return "queued", observed.waiting
    if (folder / "run.json").exists() and not observed.restarted:
        try:
            run = load_run(folder)
        except RunError as error:
            return ("running" if observed.alive else "failed"), str(error)
        # If the process is alive, the lost run is that of an earlier writer: trust the process.
        status = "running" if run.status == "lost" and observed.alive else run.status
        return status, observed.note if status == "running" else run.end_reason
    if observed.alive is None:  # on another machine: judge by its files
        fresh = SIGHTINGS.changed_lately(f"{folder} {record.created_ns}", (("", 0, record.created_ns),), STALE_S)
        return ("starting", None) if fresh else ("lost", "it runs on another machine, which does not report")
    if not observed.alive:
        return reaper.end_of_job(folder, record)
    return ("running" if record.makes == "runs" else "starting"), observed.note
