"""This machine and its processes: which process writes a run, and whether it is still alive."""

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
    """Identity of this process: enough to determine later whether it is still alive, or that only another machine
    can."""
    return {"machine": this_machine(), "pid": os.getpid(), "started_s": psutil.Process().create_time()}


def process_alive(process: Mapping[str, Any]) -> bool | None:
    """Whether the process that `this_process` described is alive; None if it is on another machine.

    The start time is compared too, since pids are reused. A zombie (ended, not yet waited for) is not alive.
    """
    if process.get("machine") != this_machine():
        return None
    pid, started = process.get("pid"), process.get("started_s")
    if not isinstance(pid, int) or not isinstance(started, int | float):
        return None
    try:
        candidate = psutil.Process(pid)
        # create_time is derived from boot time, which clock corrections move by fractions of a second.
        return abs(candidate.create_time() - started) < 2.0 and candidate.status() != psutil.STATUS_ZOMBIE
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
