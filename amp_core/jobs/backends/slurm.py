"""Jobs in a Slurm cluster, through its own commands: sbatch, squeue, sacct, scancel, sinfo.

What a job does not request, Slurm decides: sbatch also reads `SBATCH_PARTITION`, `SBATCH_QOS` and the like. A
comparison is one job on one node by default: its runs are interleaved on the same GPU, so that their times can be
compared. With `--array` each run is a task of one job array instead: it trains the same, at the same time as others on
other nodes, so that times compare nodes too.

The tasks of an array differ in their index alone, so all go through links in one hidden folder beside the run folders:
`.array-TOKEN/N` leads to the run folder of task N, whose `job.sh` it runs, and whose `console.log` gets its output.
"""

import dataclasses
import os
import re
import secrets
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from amp_core.jobs import job_file
from amp_core.jobs.backends import job_script, slurm_queue
from amp_core.jobs.backends.base import Devices
from amp_core.jobs.backends.polled import Answer, SchedulerJob
from amp_core.jobs.backends.scheduler import Scheduler, UnconfirmedError, confirm, enter
from amp_core.jobs.job_file import Record
from amp_core.schema import RunError
from amp_core.settings.resources import Resources
from amp_core.store.sources import console_tail

ASK_TIMEOUT_S = 10.0
FORM_TIMEOUT_S = 3.0
"""For the partitions of a form, which a page waits for."""
SUBMIT_TIMEOUT_S = 30.0
WARN_BEFORE_LIMIT_S = 120
"""How long before its time limit a job with `requeue` is told to save and stop; a quarter of short limits."""
MAX_NAME = 40

_ID = re.compile(r"\d+(_\d+)?")
"""The id of a job, or of a task of an array."""
_ARRAY = """\
#!/bin/bash
# The tasks of an array, written by AMPscope: task N runs the {script} of the run folder that the link N leads to.
exec bash {links}/"$SLURM_ARRAY_TASK_ID"/{script}
"""
_CONSOLE = {
    "DUE TO TIME LIMIT": "TIMEOUT",
    "DUE TO PREEMPTION": "PREEMPTED",
    "DUE TO NODE FAILURE": "NODE_FAIL",
    "oom_kill event": "OUT_OF_MEMORY",
    "oom-kill event": "OUT_OF_MEMORY",
    "xceeded job memory limit": "OUT_OF_MEMORY",
    "exceeded memory limit": "OUT_OF_MEMORY",
    " CANCELLED AT ": "CANCELLED",  # also beside the others, so last
}
"""What slurmstepd prints at the end of a job that Slurm killed."""
_ARGUMENTS = (
    ("account", "account"),
    ("partition", "partition"),
    ("time", "time"),
    ("gres", "gpus"),
    ("gpu", "gpus"),
    ("tres", "gpus"),
    ("node count", "nodes"),
    ("array", "array"),
)
"""Words of a refusal, and the argument that it is about; the first that was given, of several."""


_SILENT = ("timed out", "unable to contact", "connection refused", "zero bytes were transmitted", "communication")
"""Words of a command that did not reach the controller, or got no answer."""


class Slurm(Scheduler):
    """A Slurm cluster."""

    name = "slurm"
    label = "Slurm"

    def check_available(self) -> None:
        if shutil.which("sbatch") is None:
            raise RunError("on='slurm' needs Slurm's commands, and sbatch is not on this machine; choose local")

    def devices(self) -> Devices:
        """The partitions, the default one first."""
        self.check_available()
        lines = _answered(["sinfo", "--noheader", "-o", "%P|%a|%l|%D|%G"], FORM_TIMEOUT_S).splitlines()
        partitions: dict[str, str] = {}
        for name, up, limit, nodes, gres in sorted(
            (line.split("|", 4) for line in lines if line.count("|") >= 4), key=lambda row: not row[0].endswith("*")
        ):
            gpus = "" if gres == "(null)" else f", {gres}"
            down = "" if up == "up" else f", {up}"
            partitions.setdefault(name.rstrip("*"), f"{name.rstrip('*')} ({nodes} nodes{gpus}, limit {limit}{down})")
        return Devices(tuple(partitions.items()))

    def ask(self) -> Mapping[str, SchedulerJob]:
        self.check_available()
        return slurm_queue.with_positions(_answered(slurm_queue.LINE).splitlines())

    def send(self, folder: Path, record: Record, resources: Resources) -> str:
        _write_script(folder, record, resources, '"$SLURM_JOB_ID"')
        line = _line(f"{folder.name[:MAX_NAME]}.{record.token}", folder, resources)
        line.append(f"--output={_pattern(folder)}/{job_file.CONSOLE_FILE}")
        return _submitted([*line, job_file.SCRIPT_FILE], folder, resources)

    def submit_array(self, folders: Sequence[Path], records: Sequence[Record]) -> None:
        self.check_answering()
        token, resources = secrets.token_hex(4), Resources.from_dict(records[0].resources)
        links = folders[0].parent / f".array-{token}"
        try:
            links.mkdir()
            for index, (folder, record) in enumerate(zip(folders, records, strict=True)):
                (links / str(index)).symlink_to(folder, target_is_directory=True)
                task = enter(folder, record, f"{token}_{index}")
                _write_script(folder, task, resources, '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"')
            script = links / job_file.SCRIPT_FILE
            text = _ARRAY.format(links=shlex.quote(str(links)), script=job_file.SCRIPT_FILE)
            script.write_text(text, encoding="utf-8")
            line = _line(f"{links.parent.name[:MAX_NAME]}.{token}", links.parent, resources)
            line += [f"--array=0-{len(folders) - 1}", f"--output={_pattern(links)}/%a/{job_file.CONSOLE_FILE}"]
            array_id = _submitted([*line, str(script)], links.parent, resources, tasks=len(folders))
        except UnconfirmedError:  # the tasks, if there are any, go through the links
            raise
        except (RunError, OSError):
            shutil.rmtree(links, ignore_errors=True)
            raise
        for index, folder in enumerate(folders):
            confirm(folder, f"{array_id}_{index}")

    def cancel(self, job_id: str) -> None:
        if not _ID.fullmatch(job_id):
            raise RunError(f"job={job_id!r} is not an id of Slurm")
        _answered(["scancel", job_id])

    def cause(self, folder: Path, job: SchedulerJob) -> str | None:
        # Where Slurm itself watches the memory (OverMemoryKill), it calls the job FAILED; only slurmstepd says why.
        if job.state == "FAILED" and _printed_state(folder) == "OUT_OF_MEMORY":
            return "memory"
        return slurm_queue.ENDED.get(job.state)

    def dropped(self, record: Record, answer: Answer) -> SchedulerJob | None:
        """A task that is cancelled while it waits is no longer listed, other than a job. Its array is: by its other
        tasks, or without an index, if all were cancelled so."""
        array, _, index = str(record.token).rpartition("_")
        known = answer.by_token
        if array and (array in known or any(token.startswith(f"{array}_") for token in known)):
            return SchedulerJob(str(record.backend_id), f"{array}_{index}", "CANCELLED", "ended")
        return None

    def forgotten(self, folder: Path, record: Record) -> SchedulerJob | None:
        """From the accounting; where there is none, from what slurmstepd printed."""
        job_id = str(record.backend_id)
        if not _ID.fullmatch(job_id):
            return None
        fields = "JobID,State,ExitCode,NodeList,JobName%200"
        line = ["sacct", "-X", "--noheader", "--parsable2", "-j", job_id, "-o", fields]
        try:
            rows = [row.split("|", 4) for row in _answered(line).splitlines() if row.count("|") >= 4]
        except RunError:  # most small clusters have no accounting
            rows = []
        for listed_id, state, code, node, name in reversed(rows):
            word = state.partition(" ")[0]  # "CANCELLED by 0"
            named = slurm_queue.name_of(listed_id, name)
            if named.rpartition(".")[2] == record.token and word in slurm_queue.ENDED:
                status, _, signal = code.partition(":")
                returncode = -int(signal) if signal not in ("", "0") else int(status or 0)
                return SchedulerJob(job_id, named, word, "ended", node=node, returncode=returncode)
        printed = _printed_state(folder)
        return SchedulerJob(job_id, "", printed, "ended") if printed is not None else None


def _printed_state(folder: Path) -> str | None:
    """The state that follows from the last lines of slurmstepd in the job's output; None if it printed none."""
    lines = [line for line in console_tail(folder / job_file.CONSOLE_FILE, 30) if line.startswith("slurmstepd")]
    return next((state for part, state in _CONSOLE.items() if any(part in line for line in lines)), None)


def _write_script(folder: Path, record: Record, resources: Resources, job_id: str) -> None:
    """Write `job.sh`; `job_id` is a shell word."""
    job_script.write(
        folder,
        record,
        job_id=job_id,
        restarts='"${SLURM_RESTART_COUNT:-0}"',
        command=several_nodes(record, resources) if resources.nodes > 1 else None,
        requeue='scontrol requeue "$id"',
    )


def _line(name: str, folder: Path, resources: Resources) -> list[str]:
    """The call of sbatch without its output and its script."""
    line = [
        "sbatch",
        "--parsable",
        f"--job-name={name}",
        "--open-mode=append",
        f"--chdir={folder}",
        "--requeue" if resources.requeue else "--no-requeue",
    ]
    line += [f"--{name}={value}" for name in ("partition", "account", "time") if (value := getattr(resources, name))]
    if resources.gpus:
        line.append(f"--gpus-per-node={resources.gpus}")
    if resources.nodes > 1:
        line += [f"--nodes={resources.nodes}", "--ntasks-per-node=1"]
    if resources.requeue:
        line.append(f"--signal=B:USR1@{warn_before_s(resources.time_s)}")
    return line


def _pattern(path: Path) -> str:
    """A path in which sbatch expands nothing: it would expand %j and the like."""
    return str(path).replace("%", "%%")


def _submitted(line: Sequence[str], folder: Path, resources: Resources, tasks: int | None = None) -> str:
    """The id that sbatch gives. Raises `RunError` if it refuses, and `UnconfirmedError` if it does not answer."""
    what = "the job" if tasks is None else f"the array of {tasks} tasks"
    try:
        answer = _run(line, SUBMIT_TIMEOUT_S, cwd=folder)
    except subprocess.TimeoutExpired:
        raise UnconfirmedError(
            f"on='slurm': sbatch did not answer within {SUBMIT_TIMEOUT_S:g} s, so it is not known yet whether "
            f"Slurm has {what}; {folder.name} will show it, do not submit again"
        ) from None
    except _RefusedError as error:
        raise _about_argument(str(error), resources, tasks) from None
    return answer.strip().partition(";")[0]  # "12;cluster" in a federation


def several_nodes(record: Record, resources: Resources) -> str:
    """The training on several nodes: srun starts one torchrun per node, which meet at the first one."""
    processes = int(record.config.get("nproc") or 1)
    processes = processes if processes > 1 else resources.gpus or 1
    return (
        "head=$(hostname)  # this script runs on the first node\n"
        f"srun {job_script.python_of(record)} -m torch.distributed.run"
        f' --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node {processes} --rdzv-id "$SLURM_JOB_ID"'
        ' --rdzv-backend c10d --rdzv-endpoint "$head:$((20000 + SLURM_JOB_ID % 20000))"'
        f" {shlex.join(record.argv[1:])}"
    )


def warn_before_s(limit_s: int | None) -> int:
    """Seconds before the time limit at which a job with `requeue` is signalled."""
    return WARN_BEFORE_LIMIT_S if limit_s is None else min(WARN_BEFORE_LIMIT_S, max(1, limit_s // 4))


class _RefusedError(RunError):
    """What a command of Slurm's printed when it failed."""


def _run(line: Sequence[str], timeout_s: float, cwd: Path | None = None) -> str:
    """The output of a command of Slurm's. Raises `_RefusedError` if it fails, and `TimeoutExpired`."""
    # What a user has set for squeue, such as SQUEUE_PARTITION, would hide jobs.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SQUEUE_", "SINFO_", "SACCT_"))}
    try:
        done = subprocess.run(line, cwd=cwd, env=env, capture_output=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise _RefusedError(f"{line[0]} cannot be run: {error.strerror or error}") from None
    if done.returncode:
        lines = [text for text in done.stderr.decode("utf-8", "replace").splitlines() if text.strip()]
        message = lines[-1] if lines else f"{line[0]} ended with exit code {done.returncode}"
        raise _RefusedError(re.sub(r"^\w+: (error: |fatal: )?(Batch job submission failed: )?", "", message))
    return done.stdout.decode("utf-8", "replace")


def _answered(line: Sequence[str], timeout_s: float | None = None) -> str:
    """`_run`, with one sentence for any error; it takes `ASK_TIMEOUT_S` at most, or `timeout_s`."""
    most_s = ASK_TIMEOUT_S if timeout_s is None else timeout_s
    try:
        return _run(line, most_s)
    except subprocess.TimeoutExpired:
        raise RunError(f"Slurm did not answer within {most_s:g} s ({line[0]})") from None
    except _RefusedError as error:
        silent = any(words in str(error).lower() for words in _SILENT)
        raise RunError(f"Slurm {'did not answer' if silent else 'refused'}: {error} ({line[0]})") from None


def _about_argument(message: str, resources: Resources, tasks: int | None = None) -> RunError:
    """A refusal by sbatch, with the argument that it is about; `tasks` are those of an array."""
    values = {field.name: getattr(resources, field.name) for field in dataclasses.fields(resources)}
    values["array"] = f"{tasks} tasks" if tasks is not None else None
    named = [argument for word, argument in _ARGUMENTS if word in message.lower()]
    name = next((argument for argument in named if values[argument]), next(iter(named), "on"))
    return RunError(f"{name}={values[name]!r} was refused by Slurm: {message}")
