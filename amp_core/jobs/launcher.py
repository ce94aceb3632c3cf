"""The first half of a job's life: wait for the device, then become the training process.

    python -m amp_core.jobs.launcher RUN_FOLDER

The queue needs no dispatcher: each job waits in its own process, before torch is imported, and then replaces itself
with the training command. Pid and start time stay the same, so the job's record stays valid.
"""

import dataclasses
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from amp_core.hardware.host import this_process
from amp_core.jobs import job_file
from amp_core.jobs.reaper import write_end
from amp_core.schema import RunError

POLL_S = 0.25
RECORDED_WITHIN_S = 2.0
"""The parent records this process shortly after starting it. If it died first, this process records itself."""


def main(folder: Path) -> None:
    """Wait until no earlier job of the device is alive, then replace this process with the job's command."""

    def stop(number: int, _frame: FrameType | None) -> None:
        reason = f"stopped by {signal.Signals(number).name} before it started"
        write_end(folder, record, "stopped", reason)
        _print(reason)
        os._exit(128 + number)

    record = job_file.read(folder)
    signal.signal(signal.SIGTERM, stop)
    record = ensure_recorded(folder)
    reported: str | None = None
    ahead = job_file.ahead_of(folder, record)
    while ahead:
        name, _ = ahead[-1]
        if name != reported:
            _print(f"waiting for {record.device}: behind {name}")
            reported = name
        time.sleep(POLL_S)
        # Each poll checks only the known processes; once they have ended, the folder is read again.
        ahead = [(n, r) for n, r in ahead if _still_alive(folder.parent / n, r)] or job_file.ahead_of(folder, record)
    os.execv(record.argv[0], record.argv)


def ensure_recorded(folder: Path) -> job_file.Record:
    """The job's record, with this process in it."""
    deadline = time.monotonic() + RECORDED_WITHIN_S
    while (record := job_file.read(folder)).process is None:
        if time.monotonic() > deadline:
            record = dataclasses.replace(record, process=this_process())
            job_file.write(folder, record)
            break
        time.sleep(0.02)
    return record


def _still_alive(folder: Path, record: job_file.Record) -> bool:
    if record.process is None:
        try:
            record = job_file.read(folder)
        except RunError:  # removed meanwhile
            return False
    return bool(job_file.is_alive(record))


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - goes to the job's console.log


if __name__ == "__main__":
    main(Path(sys.argv[1]))
