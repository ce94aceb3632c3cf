"""`job.sh`, the script that a scheduler runs for a job, and `job.log`, in which it records each start and end.

    start 12 0 node7 1790000000
    end 12 0 143 1790003600

job.log lies in the run folder, so the state of a job is right even where its scheduler has forgotten it: without
accounting, Slurm forgets an ended job within minutes. A folder without a start, though the job ran, is not on a shared
disk.
"""

import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from amp_core.hardware.child_environment import python_path
from amp_core.jobs import job_file, reaper
from amp_core.jobs.job_file import LOG_FILE, SCRIPT_FILE, Record
from amp_core.settings.resources import Resources

MAX_LOG_BYTES = 64 * 1024
_TIMED_OUT = (124, -9)
"""Exit codes of `timeout`: the command ended by SIGTERM, or by SIGKILL."""

_TOP = """\
#!/bin/bash
# The job of this run folder, written by AMPscope. {log} records its starts and ends.
folder={folder}
id={id}
restarts={restarts}
cd "$folder" || exit 3
record() {{ printf '%s %s %s %s %s\\n' "$1" "$id" "$restarts" "$2" "$(date +%s)" >> "$folder/{log}"; }}
record start "$(hostname)"
trap 'record end "$?"' EXIT
trap : TERM  # the training ends its step; this shell waits for it and records the exit code
export PYTHONUNBUFFERED=1{path}
cd {directory} || exit 3
{setup}"""

_REQUEUED = """\
resume=()
if [ "$restarts" -gt 0 ] && [ -e "$folder/run.json" ]; then
    {python} -m amp_core.jobs.backends.job_script "$folder"  # an attempt whose node failed wrote no end
    resume=(--resume)
fi
trap 'again=yes; kill -TERM "$training"' USR1  # the time limit is near
{command} "${{resume[@]}}" &
training=$!
# Not by `kill -0`: the pid may be another process's by now. A signal ends `wait`, with an exit code of its own.
while jobs -rp | grep -qx "$training"; do wait "$training"; done
wait "$training"
code=$?
# A start that saved no checkpoint would be repeated for ever.
if [ -n "$again" ] && [ "$folder/checkpoint.pt" -nt "$folder/{log}" ]; then
    for pause in 0 5 15; do sleep "$pause"; {requeue} && break; done  # a busy scheduler may not answer at once
fi
exit "$code"
"""


@dataclass(frozen=True)
class Attempt:
    """The last start in a `job.log`."""

    id: str
    """The scheduler's id of the job."""
    restarts: int
    node: str
    returncode: int | None = None
    """Exit code, or minus the signal; None while it has not ended."""
    started_s: int = 0
    """When it started, seconds since 1970 by the clock of its node."""
    ended_s: int | None = None

    def reached(self, limit_s: int | None) -> bool:
        """Whether `timeout` ended it at this limit."""
        if not limit_s or self.ended_s is None or self.returncode not in _TIMED_OUT:
            return False
        return self.ended_s - self.started_s >= limit_s


def write(
    folder: Path, record: Record, *, job_id: str, restarts: str = "0", command: str | None = None, requeue: str = ""
) -> Path:
    """Write `job.sh`. `job_id` and `restarts` are shell words, `command` is the training as a line of shell (default:
    that of the record), and `requeue` the command that queues the job again."""
    resources = Resources.from_dict(record.resources)
    path = "".join(f" {name}={shlex.quote(value)}" for name, value in python_path().items())
    top = _TOP.format(
        folder=shlex.quote(str(folder)),
        log=LOG_FILE,
        id=job_id,
        restarts=restarts,
        path=path,
        directory=shlex.quote(str(Path.cwd())),
        setup="".join(f"{line}\n" for line in resources.setup),
    )
    line = command if command is not None else f"{python_of(record)} {shlex.join(record.argv[1:])}"
    again = _REQUEUED.format(command=line, log=LOG_FILE, requeue=requeue, python=python_of(record))
    script = folder / SCRIPT_FILE
    script.write_text(top + (again if resources.requeue else f"{line}\n"), encoding="utf-8")
    return script


def timed(record: Record, limit_s: int, kill_after_s: int) -> str:
    """The training as a line of shell that gets SIGTERM at its time limit, for a scheduler that has no such limit."""
    limit = (
        f"timeout --foreground --kill-after={kill_after_s} {limit_s}"  # in the foreground: no process group of its own
    )
    return f"{limit} {python_of(record)} {shlex.join(record.argv[1:])}"


def python_of(record: Record) -> str:
    """The interpreter as a shell word. With set-up lines it is the one that they put on the path."""
    return "python" if record.resources.get("setup") else shlex.quote(record.argv[0])


def last_attempt(folder: Path) -> Attempt | None:
    """The last start of the job and its end; None if it never started, as seen from here."""
    try:
        with open(folder / job_file.LOG_FILE, "rb") as log:
            text = log.read(MAX_LOG_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
    attempt = None
    for line in text.splitlines():
        what, _, rest = line.partition(" ")
        fields = rest.split(" ")
        if len(fields) != 4 or not fields[1].isdecimal():  # half a line of a full disk
            continue
        job_id, restarts, value, at_s = fields
        if not at_s.isdecimal():
            continue
        if what == "start":
            attempt = Attempt(job_id, int(restarts), value, started_s=int(at_s))
        elif what == "end" and attempt is not None and value.isdecimal():
            code = int(value)  # a shell reports the signal N as 128 + N; 130 is what ampscope returns after a stop
            code = code if code <= 128 or code == 130 else 128 - code
            attempt = replace(attempt, id=job_id, restarts=int(restarts), returncode=code, ended_s=int(at_s))
    return attempt


def end_earlier_attempt(folder: Path) -> None:
    """Write the end of a run whose process was killed, so that it can be resumed: on another machine it would count as
    running for minutes."""
    reaper.write_end(folder, job_file.read(folder), "stopped", "its job was queued again")


if __name__ == "__main__":
    end_earlier_attempt(Path(sys.argv[1]))
