"""This machine and its processes: which process writes a run, whether it is still alive, and its Slurm job."""

import contextlib
import functools
import os
import platform
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil


def this_process() -> dict[str, Any]:
    """Identity of this process; see `identity`."""
    return identity(os.getpid())


def identity(pid: int) -> dict[str, Any]:
    """Identity of a process: enough to determine later whether it is still alive, or that only another machine can.

    `started_ticks` are the kernel's clock ticks from boot to its start, which setting the clock does not change; null
    if not on Linux.
    """
    process = psutil.Process(pid)
    ticks = _started_ticks(pid)
    return {"machine": this_machine(), "pid": pid, "started_s": process.create_time(), "started_ticks": ticks}


def seconds_after(candidate: psutil.Process, process: Mapping[str, Any]) -> float:
    """How much later `candidate` began than the process of this machine that `identity` described."""
    ticks, now = process.get("started_ticks"), _started_ticks(candidate.pid)
    if isinstance(ticks, int) and now is not None:
        return (now - ticks) / os.sysconf("SC_CLK_TCK")
    # On Linux create_time is derived from boot time, which moves when the clock is set.
    return float(candidate.create_time() - process["started_s"])


def is_same_process(candidate: psutil.Process, process: Mapping[str, Any]) -> bool:
    """Whether it is the process that `identity` described: pids are reused, start times are not."""
    return abs(seconds_after(candidate, process)) < 2.0  # clock corrections move create_time by fractions of a second


def _started_ticks(pid: int) -> int | None:
    """Field `starttime` of /proc/PID/stat, which follows the command in parentheses (proc(5)); None without it."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]) or None
    except (OSError, ValueError, IndexError):
        return None


def process_alive(process: Mapping[str, Any]) -> bool | None:
    """Whether the process that `identity` described is alive; None if it is on another machine.

    A zombie (ended, not yet waited for) is not alive.
    """
    if process.get("machine") != this_machine():
        return None
    pid, started = process.get("pid"), process.get("started_s")
    if not isinstance(pid, int) or not isinstance(started, int | float):
        return None
    try:
        candidate = psutil.Process(pid)
        return is_same_process(candidate, process) and candidate.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return False
    except psutil.AccessDenied:
        return True


@functools.cache
def this_machine() -> str:
    """Host, boot and container: the scope in which a pid is unique."""
    parts = [socket.gethostname()]
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    if boot.exists():
        parts.append(boot.read_text().strip()[:8])
    if namespace.exists():
        parts.append(str(namespace.stat().st_ino))
    return "/".join(parts)


def slurm_job() -> dict[str, Any] | None:
    """The Slurm job that this process belongs to, from the variables that Slurm sets; None outside of Slurm.

    Keys: `id` (`12`, or `12_3` for a task of an array), `array` (the id of the array; null for a single job), `nodes`
    (a list with the names of its nodes as Slurm writes them, such as `n[1-2]`).
    """
    job, array, task, nodes = (
        os.environ.get(f"SLURM_{name}") for name in ("JOB_ID", "ARRAY_JOB_ID", "ARRAY_TASK_ID", "JOB_NODELIST")
    )
    if job is None:
        return None
    return {"id": job if array is None else f"{array}_{task}", "array": array, "nodes": [nodes] if nodes else []}


def cpu_name() -> str:
    """The processor's model name, or the machine's architecture where it has none."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cpu_flags() -> frozenset[str] | None:
    """The instruction sets that the kernel lists for the processor; None if it lists none (not Linux)."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(("flags", "Features")):
                return frozenset(line.partition(":")[2].split())
    return None


@contextlib.contextmanager
def bounded_memory(gib: int) -> Iterator[None]:
    """Limit the address space of this process to `gib` GiB within the context: beyond it, `MemoryError` is raised.

    Windows has no such limit. Child processes started within the context inherit it.
    """
    if sys.platform == "win32":
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = gib * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (limit if soft == resource.RLIM_INFINITY else min(soft, limit), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
