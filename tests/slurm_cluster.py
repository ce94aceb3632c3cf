"""A Slurm cluster of two nodes on this machine: munged, slurmctld and two slurmd of Debian's slurm-wlm and munge.

All files, keys and ports are its own, so it needs neither root nor an installed configuration, and disturbs none.
"""

import contextlib
import datetime
import getpass
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import psutil

from tests.waiting import wait_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
KILL_WAIT_S = 2
COMMAND_TIMEOUT_S = 30.0
"""A command that lost its controller's answer may wait forever; it is ended, and counts as failed."""
END_TIMEOUT_S = 20.0
"""How long a daemon may take to end after SIGTERM; then it is killed."""
NODE_MEMORY_MB = 100_000
"""What the configuration claims, so that a job may have gigabytes, whatever the machine has."""
REVOKED_S = 2.0
"""How long a job that a node ended or lost must wait before it starts there again.

The node revokes the job's credential, and compares times in whole seconds: a credential of the same second is refused
("Job credential revoked"), and the job fails.
"""

SHOWN_LINES = 80
"""Lines of each daemon's log that a failing test shows."""
IDS = 1000
"""Ids of jobs that each start of the controller has to itself.

A controller that was killed has forgotten its latest jobs, which still run, and would give their ids again: the node
refuses a second job of that id, and the controller drains the node ("Duplicate jobid").
"""

_CONF = """\
FirstJobId={first}
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU={memory}
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
SlurmdParameters=config_overrides
KillWait={kill_wait}
MessageTimeout=3
MinJobAge=3600
NodeName=DEFAULT CPUs={cpus} RealMemory={node_memory} State=UNKNOWN
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{node}-{last}]
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP PreemptMode=OFF
PartitionName=short Nodes=n1 MaxTime=60 State=UP PreemptMode=OFF
PartitionName=down Nodes=n2 State=DOWN PreemptMode=OFF
PartitionName=cancelled Nodes=n2 State=UP PreemptMode=CANCEL
PartitionName=requeued Nodes=n2 State=UP PreemptMode=REQUEUE
PartitionName=first Nodes=n2 State=UP PreemptMode=OFF PriorityTier=10
"""


def missing() -> str | None:
    """Why no cluster can be started here; None if one can."""
    os.environ["PATH"] += os.pathsep + "/usr/sbin"  # where Debian puts the daemons
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"needs Debian's slurm-wlm and munge; missing: {', '.join(lacking)}" if lacking else None


class Cluster:
    """A running cluster. `conf` is the value of SLURM_CONF; `more` are further lines of it."""

    def __init__(self, folder: Path, cpus: int = 32, more: str = "") -> None:
        self.folder = folder
        self.conf = folder / "slurm.conf"
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("state", "spool/n1", "spool/n2"):
            (folder / name).mkdir(parents=True)
        key = folder / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        controller, node = _free_ports()
        values = {
            "host": socket.gethostname(),
            "user": getpass.getuser(),
            "folder": folder,
            "kill_wait": KILL_WAIT_S,
            "node_memory": NODE_MEMORY_MB,
        }
        ports = {"controller": controller, "node": node, "last": node + 1}
        conf = _CONF.format(**values, **ports, cpus=cpus, memory=NODE_MEMORY_MB // cpus, first="{first}") + more
        self._conf_of = conf.format
        self._starts = 0
        files = {"socket": "munge.sock", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        try:
            self._start(files)
        except BaseException:
            self.close()
            raise

    def _start(self, files: dict[str, str]) -> None:
        self._begin(
            "munged", "--foreground", "--force", *(f"--{name}={self.folder / file}" for name, file in files.items())
        )
        wait_for((self.folder / "munge.sock").exists)
        self.start_controller()
        for name in ("n1", "n2"):
            self._begin(name, "-D", "-N", name, program="slurmd")
        wait_for(lambda: self.ask("sinfo", "-h", "-p", "debug", "-t", "idle", "-o", "%N").strip() == "n[1-2]")

    def start_controller(self) -> None:
        """Start slurmctld, with the state that an earlier one saved."""
        self.conf.write_text(self._conf_of(first=1 + IDS * self._starts))
        self._starts += 1
        self._begin("slurmctld", "-D")
        wait_for(lambda: "UP" in self.ask("scontrol", "ping"))

    def stop_controller(self, *, kill: bool = False) -> None:
        """End slurmctld; with `kill` by SIGKILL, which loses what it has not saved yet."""
        process = self._running.pop("slurmctld")
        if kill:
            process.kill()
        _end(process)

    def ask(self, *line: str) -> str:
        """What a command of Slurm's prints; empty if it fails."""
        done = self._run(*line)
        return done.stdout if done.returncode == 0 else ""

    def _run(self, *line: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"SLURM_CONF": str(self.conf)}
        try:
            return subprocess.run(line, env=env, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # like a command that the controller refused: `do` repeats it
            return subprocess.CompletedProcess(line, 124, "", f"no answer within {COMMAND_TIMEOUT_S:g} s")

    def do(self, *line: str) -> None:
        """Run a command of Slurm's until it succeeds: a busy controller may not answer at once."""
        wait_for(lambda: self._run(*line).returncode == 0)

    def reach_time_limit(self, job_id: str) -> None:
        """Let a running job reach its time limit now."""
        at = datetime.datetime.now() + datetime.timedelta(seconds=1)
        self.do("scontrol", "update", f"jobid={job_id}", f"EndTime={at:%Y-%m-%dT%H:%M:%S}")

    def start_node(self, name: str) -> None:
        """Start a node's slurmd, and let the node take jobs again."""
        self._begin(name, "-D", "-N", name, program="slurmd")

        def idle() -> bool:
            if (state := self._node_state(name)) != "idle":  # again and again: the node may not have registered yet
                self.ask("scontrol", "update", f"nodename={name}", "state=resume")
            return state == "idle"

        wait_for(idle)
        time.sleep(REVOKED_S)

    def crash_node(self, name: str) -> None:
        """Kill a node's slurmd and its jobs, as a power failure does, and let the controller know."""
        process = self._running.pop(name)
        process.kill()
        process.wait()
        for stepd in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess):
                if stepd.name() == "slurmstepd" and stepd.environ().get("SLURM_CONF") == str(self.conf):
                    for one in (*stepd.children(recursive=True), stepd):
                        one.kill()
        self.do("scontrol", "update", f"nodename={name}", "state=down", "reason=crashed")

    def _node_state(self, name: str) -> str:
        return self.ask("sinfo", "-h", "-n", name, "-p", "requeued", "-o", "%t").strip()

    def start_now(self, job_id: str) -> None:
        """Start a job that was queued again without the two minutes that it waits otherwise."""
        wait_for(lambda: self._state(job_id) == "PENDING")  # no longer COMPLETING: its node has ended it
        time.sleep(REVOKED_S)

        def started() -> bool:
            # Again and again: Slurm sets the time anew once the job's first start is cleaned up.
            state = self._state(job_id)
            if state == "PENDING":
                self.ask("scontrol", "update", f"jobid={job_id}", "StartTime=now")
            return state not in ("PENDING", "")  # empty: squeue was not answered

        wait_for(started)

    def _state(self, job_id: str) -> str:
        return self.ask("squeue", "-h", "-j", job_id, "-o", "%T").strip()

    def names(self) -> list[str]:
        """Names of all jobs that the controller knows, ended ones included, in order."""
        return sorted(self.ask("squeue", "-h", "-t", "all", "-o", "%j").split())

    def last_lines(self) -> dict[Path, str]:
        """The end of each daemon's log."""
        logs = sorted(self.folder.glob("*.log"))
        return {log: "".join(log.read_text(errors="replace").splitlines(keepends=True)[-SHOWN_LINES:]) for log in logs}

    def close(self) -> None:
        """End all jobs and daemons."""
        self.ask("scancel", "--user", getpass.getuser())
        deadline = time.monotonic() + 2 * KILL_WAIT_S
        while self.ask("squeue", "-h") and time.monotonic() < deadline:
            time.sleep(0.1)
        for name in ("n1", "n2", "slurmctld", "munged"):
            if name in self._running:
                _end(self._running[name])

    def _begin(self, name: str, *arguments: str, program: str | None = None) -> None:
        with open(self.folder / f"{name}.out", "ab") as out:
            self._running[name] = subprocess.Popen(
                [str(shutil.which(program or name)), *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=os.environ | {"SLURM_CONF": str(self.conf)},
                start_new_session=True,
            )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a daemon: by SIGTERM, and if it does not end by SIGKILL."""
    process.terminate()
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_ports() -> tuple[int, int]:
    """A free port, and the first of two others."""
    while True:
        sockets = [socket.socket() for _ in range(3)]
        try:
            sockets[0].bind(("127.0.0.1", 0))
            sockets[1].bind(("127.0.0.1", 0))
            first = sockets[1].getsockname()[1]
            try:
                sockets[2].bind(("127.0.0.1", first + 1))
            except OSError:
                continue
            return sockets[0].getsockname()[1], first
        finally:
            for one in sockets:
                one.close()
