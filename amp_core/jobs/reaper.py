"""The end of a job: detect it, clean up, and record it if the training process could not do so itself.

A training process nearly always writes its own end (`shutdown`). The exceptions are processes that were killed, crashed
the interpreter, or died before the run began. This module records those ends in `run.json` with the last lines of
output, and kills the processes that the job left running.
"""

import contextlib
import dataclasses
import datetime
import os
import signal
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from amp_core.hardware.host import is_same_process, seconds_after
from amp_core.jobs import job_file
from amp_core.schema import Head, RunError
from amp_core.store.atomic import replace_file
from amp_core.store.run import load_run
from amp_core.store.sources import console_tail

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def record_end(folder: Path, record: job_file.Record, returncode: int | None) -> job_file.Record:
    """Kill the remaining processes of an ended job, and record in `run.json` and `job.json` how it ended.

    `returncode` is None if no parent observed the end. A run without an exit code, a stop request and a scheduler's
    word stays unchanged: readers show it as lost.
    """
    _kill(remaining_processes(record))
    record = dataclasses.replace(record, ended_s=record.ended_s or time.time(), returncode=returncode)
    began = (folder / "run.json").exists()
    reported = returncode is not None or record.stop_requested_s is not None or bool(record.scheduler)
    if record.makes == "run" and (not began or reported):
        write_end(folder, record, *end_of_job(folder, record))
    if record.scheduler:
        for run in (folder / "run.json",) if record.makes == "run" else folder.glob("**/run.json"):
            _note_scheduler(run, record.scheduler)
    job_file.write(folder, record)
    return record


def end_of_job(folder: Path, record: job_file.Record) -> tuple[str, str]:
    """Status and reason of a job whose process ended without writing an end."""
    code = record.returncode
    if record.makes == "runs" and code == 0:
        return "finished", ""
    lines = [line for line in console_tail(folder / job_file.CONSOLE_FILE, 6) if line.strip()]
    if record.stop_requested_s is not None:
        killed = code == -signal.SIGKILL or (code is None and time.time() > kill_due_s(record))
        how = (
            f"killed: it did not end within {record.stop_grace_s:g} s of the request to stop"
            if killed
            else "stopped on request"
        )
        return "stopped", how
    if sentence := record.scheduler.get("sentence"):
        return str(record.scheduler["status"]), f"{sentence}. Last output: {' / '.join(lines)}" if lines else sentence
    if code == 2 and lines and lines[-1].startswith("ampscope: "):  # bad input, reported in one sentence
        return "failed", lines[-1].removeprefix("ampscope: ")
    if code is None:
        status, how = "failed", "it ended before it recorded anything"
        if record.makes == "runs":
            status, how = "lost", "its end was not observed"
    elif code == 130 and record.makes == "runs":
        status, how = "stopped", "stopped on request"
    elif code >= 0:
        wrote = "" if record.makes == "runs" else " without recording an end"
        status, how = "failed", f"ended with exit code {code}{wrote}"
    elif -code in _STOP_SIGNALS:
        status, how = "stopped", f"stopped by {signal.Signals(-code).name}"
    else:
        status, how = "failed", f"killed by {_signal(-code)}"
        if -code == signal.SIGKILL:
            how += ", as the kernel does when memory runs out"
    return status, f"{how}. Last output: {' / '.join(lines)}" if lines else how


def write_end(folder: Path, record: job_file.Record, status: str, reason: str) -> None:
    """Write the end into `run.json`, created if the training did not do so. An existing end stays unchanged."""
    if (folder / "run.json").exists():
        try:
            head = load_run(folder).head
        except RunError:  # damaged, or newer than this version: keep it, and readers report the error
            return
        if head.status != "running":
            return
        head = dataclasses.replace(head, status=status, end_reason=reason)
    else:
        created = datetime.datetime.fromtimestamp(record.created_ns / 1e9, datetime.UTC)
        head = Head(
            run_id=uuid.uuid4().hex[:12],
            name=folder.name,
            created_at=created.isoformat(timespec="milliseconds"),
            status=status,
            end_reason=reason,
            config=dict(record.config) | {"source": "train"},
            process=record.process or {},
        )
    replace_file(folder / "run.json", head.to_json().encode())


def _note_scheduler(file: Path, scheduler: Mapping[str, Any]) -> None:
    """Write into the head of a run that did not finish how its scheduler ended the job; findings read it there."""
    try:
        head = load_run(file.parent).head
    except RunError:  # damaged, or removed meanwhile
        return
    if head.status == "finished" or head.job:
        return
    reason, sentence = head.end_reason or "", scheduler.get("sentence") or ""
    if sentence and sentence not in reason:
        reason = f"{reason}: {sentence}" if reason else sentence
    head = dataclasses.replace(head, job=scheduler, end_reason=reason)
    replace_file(file, head.to_json().encode())


def send_stop(record: job_file.Record) -> None:
    """Send SIGTERM to the job's process, if its pid still belongs to it. Raises `RunError` if it is another user's."""
    process = _process(record)
    if process is not None:
        try:
            process.terminate()
        except psutil.NoSuchProcess:  # it ended meanwhile
            return
        except psutil.AccessDenied:
            raise RunError(f"the job's process {process.pid} belongs to another user, who can stop it") from None


def kill(record: job_file.Record) -> None:
    """Send SIGKILL to the job's process and to everything it started."""
    process = _process(record)
    _kill([*remaining_processes(record), *([process] if process is not None else [])])


def kill_due_s(record: job_file.Record) -> float:
    """When a job is killed if it does not stop, in seconds since 1970; infinity without a stop request."""
    return float("inf") if record.stop_requested_s is None else record.stop_requested_s + record.stop_grace_s


def remaining_processes(record: job_file.Record) -> list[psutil.Process]:
    """Living processes of the job's session other than its leader: data loaders, compilers, and their children.

    A job is the leader of its session, so the session id is its pid, also after its death: the kernel does not reuse a
    number that a session still has. If the pid belongs to another process now, the whole session has ended.
    """
    if record.process is None or job_file.is_alive(record) is None:
        return []
    pid = record.pid
    processes = []
    for process in psutil.process_iter():
        try:
            if process.pid == pid:
                if not _is_same(process, record):
                    return []
            elif os.getsid(process.pid) == pid and seconds_after(process, record.process) >= -2.0:
                processes.append(process)
        except (psutil.Error, ProcessLookupError, PermissionError):  # ended meanwhile, or of another user
            continue
    return processes


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # ended, or of another user
            process.kill()


def _process(record: job_file.Record) -> psutil.Process | None:
    if not job_file.is_alive(record) or record.process is None:
        return None
    try:
        process = psutil.Process(record.process["pid"])
        return process if _is_same(process, record) else None
    except psutil.NoSuchProcess:
        return None


def _is_same(process: psutil.Process, record: job_file.Record) -> bool:
    return record.process is not None and is_same_process(process, record.process)


def _signal(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"
