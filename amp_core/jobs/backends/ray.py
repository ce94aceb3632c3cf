"""Jobs in a Ray cluster, through Ray's job submission API (extra `ray`).

The cluster is the one that `RAY_ADDRESS` names, else the one of this machine, as for `ray job submit`. A comparison is
one job, as with Slurm. A job requests one CPU and its GPUs, so that Ray queues what does not fit. Ray has no time limit
for jobs, so the job's own script keeps it.
"""

import re
import shlex
import threading
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from amp_core.jobs import job_file
from amp_core.jobs.backends import job_script
from amp_core.jobs.backends.base import Devices
from amp_core.jobs.backends.job_script import last_attempt
from amp_core.jobs.backends.polled import SchedulerJob
from amp_core.jobs.backends.scheduler import Scheduler, UnconfirmedError
from amp_core.jobs.job_file import Record
from amp_core.schema import RunError
from amp_core.settings.resources import Resources

_T = TypeVar("_T")

ANSWER_TIMEOUT_S = 20.0
"""The client is asked in a thread, since its requests have no time limit. Its first import takes seconds."""
STOP_WAIT_S = 30
"""How long a training has between SIGTERM and SIGKILL; Ray's own 3 s are too short for a step and its end."""
MAX_NAME = 40
MAX_REASON = 160
WAITING = "waiting for free CPUs or GPUs"

_PHASES = {"PENDING": "waiting", "RUNNING": "running", "SUCCEEDED": "ended", "FAILED": "ended", "STOPPED": "ended"}
_CAUSES = (
    ("out of memory", "memory"),
    ("outofmemory", "memory"),
    ("node has died", "node failure"),
    ("node was terminated", "node failure"),
    ("actor died", "node failure"),
)
"""Words in the message of a failed job, and the cause."""


class Ray(Scheduler):
    """A Ray cluster."""

    name = "ray"
    label = "Ray"

    def check_available(self) -> None:
        try:
            metadata.version("ray")
        except metadata.PackageNotFoundError:
            raise RunError("on='ray' needs the package ray; install it with pip install 'ampscope[ray]'") from None

    def devices(self) -> Devices:
        """The cluster; Ray itself places a job by the GPUs that it requests."""
        self.check_available()
        return Devices((("ray", "the Ray cluster"),))

    def ask(self) -> Mapping[str, SchedulerJob]:
        self.check_available()
        listed = _within(lambda: _client().list_jobs())
        return {job.submission_id: _job(job) for job in listed if job.submission_id}

    def send(self, folder: Path, record: Record, resources: Resources) -> str:
        word = re.sub(r"[^\w.-]", "-", folder.name)[:MAX_NAME]  # job.log separates its words by spaces
        job_id = f"{word}.{record.token}"
        timed = job_script.timed(record, resources.time_s, STOP_WAIT_S) if resources.time_s else None
        script = job_script.write(folder, record, job_id=shlex.quote(job_id), command=timed)
        console = shlex.quote(str(folder / job_file.CONSOLE_FILE))
        try:
            _within(
                lambda: _client().submit_job(
                    entrypoint=f"exec bash {shlex.quote(str(script))} >> {console} 2>&1",
                    submission_id=job_id,  # of two submissions with the same id, Ray refuses one
                    entrypoint_num_cpus=1,
                    entrypoint_num_gpus=resources.gpus or 0,
                    runtime_env={"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S)}},
                )
            )
        except TimeoutError:
            raise UnconfirmedError(
                f"on='ray': Ray did not answer within {ANSWER_TIMEOUT_S:g} s, so it is not known yet whether it has "
                f"the job; {folder.name} will show it, do not submit again"
            ) from None
        return job_id

    def cancel(self, job_id: str) -> None:
        try:
            _within(lambda: _client().stop_job(job_id))
        except TimeoutError:
            raise RunError(f"Ray did not answer within {ANSWER_TIMEOUT_S:g} s; try again") from None

    def forgotten(self, folder: Path, record: Record) -> SchedulerJob | None:
        """A job that reached its time limit; Ray forgets its jobs when its head is restarted."""
        if not _reached_limit(folder, record):
            return None
        return SchedulerJob(str(record.backend_id), str(record.backend_id), "FAILED", "ended", ran=True)

    def cause(self, folder: Path, job: SchedulerJob) -> str | None:
        if _reached_limit(folder, job_file.read(folder)):
            return "time limit"
        if job.state == "STOPPED":
            return "cancelled"
        if job.state == "FAILED":
            return next((cause for part, cause in _CAUSES if part in job.reason.lower()), None)
        return None


def _reached_limit(folder: Path, record: Record) -> bool:
    attempt = last_attempt(folder)
    return attempt is not None and attempt.reached(Resources.from_dict(record.resources).time_s)


def _job(details: Any) -> SchedulerJob:
    """A job of ours from Ray's `JobDetails`."""
    state, driver = str(getattr(details.status, "value", details.status)), details.driver_info
    return SchedulerJob(
        id=details.submission_id,
        name=details.submission_id,
        state=state,
        phase=_PHASES.get(state, "running"),
        reason=WAITING if state == "PENDING" else " ".join(str(details.message or "").split())[:MAX_REASON],
        node=str(driver.node_ip_address) if driver is not None else "",
        returncode=details.driver_exit_code,
        ran=details.driver_exit_code is not None,
    )


def _client() -> Any:
    from ray.job_submission import JobSubmissionClient  # seconds, and only where Ray is used

    return JobSubmissionClient()


def _within(call: Callable[[], _T]) -> _T:
    """The result of `call`. Raises `TimeoutError` after `ANSWER_TIMEOUT_S`, and `RunError` for any error of Ray's."""
    results: list[_T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:  # the client raises RuntimeError, ConnectionError and those of its HTTP library
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(ANSWER_TIMEOUT_S)
    if errors:
        first = (str(errors[0]).strip().splitlines() or [type(errors[0]).__name__])[0]
        raise RunError(f"Ray refused: {first[:MAX_REASON]}")
    if not results:
        raise TimeoutError
    return results[0]
