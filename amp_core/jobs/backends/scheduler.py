"""What all schedulers have in common: a job is submitted once, and its end is recorded once.

A scheduler's job is known by a token in its name, which is on disk before the job is submitted. So nothing is submitted
twice: after a crash or a scheduler that hung, the job is found by its token, or it is recorded as not submitted. While
the scheduler knows a job, its word counts; afterwards `job.log` does, which the job itself writes.
"""

import dataclasses
import os
import secrets
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from amp_core.jobs import job_file, reaper
from amp_core.jobs.backends.base import Backend, Observed
from amp_core.jobs.backends.job_script import Attempt, last_attempt
from amp_core.jobs.backends.polled import Answer, Polled, SchedulerJob
from amp_core.jobs.job_file import Living, Record
from amp_core.schema import RunError
from amp_core.settings.resources import Resources
from amp_core.settings.training import TrainConfig

SETTLE_S = 60.0
"""From this age on, a job that the scheduler does not list is gone: younger ones may still be on their way."""
SUBMIT_WAIT_S = 15.0
"""How long a submission waits for the scheduler's first answer."""
FILES_S = 60.0
"""How long the last files of an ended job may take to appear: NFS caches a folder for up to a minute."""

SHOWN = ("partition", "gpus", "nodes", "time", "account")
"""What `run.json` holds of the resources: not the set-up lines, which may contain anything."""

CAUSES = {
    "time limit": ("stopped", "the job was ended in {name} at its time limit{limit}"),
    "memory": ("failed", "{name} ended the job because it exceeded its memory limit"),
    "preemption": ("stopped", "{name} ended the job for one of higher priority"),
    "node failure": ("failed", "{name} ended the job because its node failed"),
    "cancelled": ("stopped", "the job was cancelled in {name}"),
    "not shared": (
        "failed",
        "the job ran on {node}, but wrote nothing into this folder: put the runs on a disk that all nodes share",
    ),
    "no end": ("failed", "the job recorded no end, and {name} lists it as ended"),
    "not submitted": ("failed", "{name} did not take the job"),
    "unknown": ("failed", "{name} no longer lists the job, and the job recorded no end"),
}
"""Why a job ended, other than by its own exit: the run's status, and the sentence."""


class UnconfirmedError(RunError):
    """A scheduler that did not say whether it took a job."""


class Scheduler(Backend):
    """A backend whose jobs another program queues and starts."""

    def __init__(self) -> None:
        self.polled = Polled(self.ask, self.label)
        self._ended: dict[str, float] = {}  # by token: when a job was first seen as ended, without all of its files

    @abstractmethod
    def ask(self) -> Mapping[str, SchedulerJob]:
        """All jobs that the scheduler lists, by id. Raises `RunError` if it does not answer in time."""

    @abstractmethod
    def send(self, folder: Path, record: Record, resources: Resources) -> str:
        """Submit the job; returns its id. Raises `RunError` if it is refused, `UnconfirmedError` if unknown."""

    @abstractmethod
    def cancel(self, job_id: str) -> None:
        """Cancel a job. Raises `RunError` if that is refused."""

    def cause(self, folder: Path, job: SchedulerJob) -> str | None:
        """The key of `CAUSES` for an ended job; None if it ended by itself."""

    def forgotten(self, folder: Path, record: Record) -> SchedulerJob | None:  # noqa: ARG002 - not all can say
        """What else is known of a job that the scheduler no longer lists."""
        return None

    def dropped(self, record: Record, answer: Answer) -> SchedulerJob | None:  # noqa: ARG002 - not all drop jobs
        """How a job ended that is missing in the answer though the scheduler knows of its submission; None if that
        cannot be told."""
        return None

    def device_of(self, config: TrainConfig, resources: Resources) -> str:  # noqa: ARG002
        return f"{self.name}:{resources.partition}" if resources.partition else self.name

    def submit(self, folder: Path, record: Record) -> None:
        self.check_answering()
        record = enter(folder, record, secrets.token_hex(4))
        confirm(folder, self.send(folder, record, Resources.from_dict(record.resources)))

    def check_answering(self) -> None:
        """Raise `RunError` if no job can be submitted from here, or the scheduler does not answer: before anything is
        submitted."""
        self.check_available()
        error = self.polled.latest(SUBMIT_WAIT_S).error
        if error is not None:
            raise RunError(f"on={self.name!r} is not possible now: {error}")

    def upkeep(self, folder: Path, record: Record) -> Record:
        if record.ended_s is not None:
            return record
        answer = self.polled.latest()
        if record.backend_id is None:
            record = self._adopt(folder, record, answer)
        end = self._end(folder, record, answer)
        if end is None:
            return record
        returncode, facts = end
        record = dataclasses.replace(record, scheduler=facts)
        if not os.access(folder, os.W_OK):  # a job of another user, who records its end
            return dataclasses.replace(record, ended_s=time.time(), returncode=returncode)
        self._ended.pop(str(record.token), None)
        return reaper.record_end(folder, record, returncode)

    def observe(self, folder: Path, record: Record, others: Sequence[Living] | None) -> Observed:  # noqa: ARG002
        if record.ended_s is not None:
            return Observed(alive=False)
        answer = self.polled.latest()
        job = answer.by_token.get(str(record.token))
        note = None if answer.error is None else f"{answer.error}; its state may be old"
        if job is not None and job.phase == "waiting":
            why = f": {job.reason}" if job.reason else ""
            return Observed(True, f"{job.state.lower()} in {self.label}{why}", job.position, note=note)
        attempt = last_attempt(folder)
        if job is None and attempt is None:
            return Observed(True, f"submitted to {self.label}" if note is None else note, note=note)
        if job is not None and job.phase == "ended" and note is None:
            note = f"{job.state} in {self.label}; waiting for its last files to appear"
        node = job.node if job is not None and job.node else attempt.node if attempt is not None else None
        return Observed(True, node=node, note=note, restarted=_restarted(folder, attempt))

    def request_stop(self, folder: Path, grace_s: float) -> None:
        """Cancel the job; the scheduler's own grace period counts, not `grace_s`."""
        record = job_file.read(folder)
        if record.ended_s is not None or record.stop_requested_s is not None:
            return
        self.check_available()
        if record.backend_id is None:
            raise RunError(f"job={folder.name!r} is not confirmed by {self.label} yet; stop it in a minute")
        listed = self.polled.latest().jobs.get(record.backend_id)
        if listed is not None and listed.token != record.token:  # the scheduler has lost its state, or is another one
            raise RunError(f"job={folder.name!r}: {self.label}'s job {record.backend_id} is another one")
        _update(folder, stop_requested_s=time.time(), stop_grace_s=grace_s)
        try:
            self.cancel(record.backend_id)
        except RunError:
            _update(folder, stop_requested_s=None)
            raise

    def _adopt(self, folder: Path, record: Record, answer: Answer) -> Record:
        """The record with the id of a job whose submission was not confirmed, if it is found by its token."""
        job, attempt = answer.by_token.get(str(record.token)), last_attempt(folder)
        job_id = job.id if job is not None else attempt.id if attempt is not None else None
        if job_id is None:
            return record
        if not os.access(folder, os.W_OK):
            return dataclasses.replace(record, backend_id=job_id)
        return _update(folder, backend_id=job_id)

    def _end(self, folder: Path, record: Record, answer: Answer) -> tuple[int | None, dict[str, Any]] | None:
        """Exit code and facts of a job that has ended; None if it has not, or may not have."""
        job = answer.by_token.get(str(record.token))
        if job is not None and job.phase != "ended":
            return None
        attempt = last_attempt(folder)
        code = attempt.returncode if attempt is not None else None
        if job is not None:
            if job.ran and code is None and not self._files_are_due(record):
                return None
            code = code if code is not None else job.returncode
            cause = self.cause(folder, job)
            if cause is None and job.ran and attempt is None:
                cause = "not shared"
            elif cause is None and code is None:
                cause = "no end"
            return code, self._facts(record, job, attempt, cause)
        dropped = self.dropped(record, answer) if attempt is None else None
        if dropped is not None and record.stop_requested_s is None and not self._files_are_due(record):
            return None  # it may have run, and its files may be on their way
        listed = dropped is not None or answer.asked_s > record.created_ns / 1e9 + SETTLE_S
        if not listed and (code is None or record.resources.get("requeue")):
            return None  # the answer may be older than the job, which may be queued again since its start ended
        job = (self.forgotten(folder, record) if record.backend_id is not None else None) or dropped
        if job is not None:
            return code if code is not None else job.returncode, self._facts(
                record, job, attempt, self.cause(folder, job)
            )
        cause = None if code is not None else "unknown" if record.backend_id is not None else "not submitted"
        return code, self._facts(record, None, attempt, cause)

    def _files_are_due(self, record: Record) -> bool:
        """Whether the job was seen as ended for so long that all of its files must have appeared."""
        first = self._ended.setdefault(str(record.token), time.monotonic())
        return time.monotonic() - first >= FILES_S

    def _facts(
        self, record: Record, job: SchedulerJob | None, attempt: Attempt | None, cause: str | None
    ) -> dict[str, Any]:
        """What `job.json` and `run.json` hold of the job's end."""
        if cause == "cancelled" and record.stop_requested_s is not None:
            cause = None
        node = (job.node if job is not None else "") or (attempt.node if attempt is not None else "")
        facts: dict[str, Any] = {
            "backend": self.name,
            "id": record.backend_id,
            "state": job.state if job is not None else None,
            "reason": job.reason or None if job is not None else None,
            "node": node or None,
            "restarts": attempt.restarts if attempt is not None else 0,
            "requested": {name: value for name, value in record.resources.items() if name in SHOWN and value},
            "cause": cause,
        }
        if cause is not None:
            limit = f" of {record.resources['time']}" if record.resources.get("time") else ""
            status, sentence = CAUSES[cause]
            explanation = ": ".join(part for part in (job.state, job.reason) if part) if job is not None else ""
            facts["status"] = status
            facts["sentence"] = sentence.format(name=self.label, limit=limit, node=node) + (
                f" ({explanation})" if explanation else ""
            )
        return facts


def enter(folder: Path, record: Record, token: str) -> Record:
    """Write the record of a job, with its token, before the job is submitted; returns that record."""
    record = dataclasses.replace(record, token=token)
    (folder / job_file.LOG_FILE).unlink(missing_ok=True)  # of an earlier job, whose run this one resumes
    job_file.write(folder, record)
    return record


def confirm(folder: Path, job_id: str) -> None:
    """Record the id that the scheduler gave a submitted job."""
    _update(folder, backend_id=job_id)


def _update(folder: Path, **changes: Any) -> Record:
    """Change some fields of a `job.json` that others may change too."""
    with job_file.lock:
        record = dataclasses.replace(job_file.read(folder), **changes)
        job_file.write(folder, record)
    return record


def _restarted(folder: Path, attempt: Attempt | None) -> bool:
    """Whether the end in `run.json` is that of an earlier attempt: the job has started again since."""
    if attempt is None or attempt.returncode is not None:
        return False
    try:
        return (folder / "run.json").stat().st_mtime_ns < (folder / job_file.LOG_FILE).stat().st_mtime_ns
    except OSError:
        return False
