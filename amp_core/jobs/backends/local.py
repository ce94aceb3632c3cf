"""Jobs as processes of this machine, one at a time per device.

Each job is a process of its own that waits for its device and then becomes the training (`amp_core.jobs.launcher`). The
queue consists of the `job.json` files alone.
"""

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from amp_core.hardware.child_environment import python_path
from amp_core.hardware.device_types import ACCELERATORS
from amp_core.hardware.host import identity
from amp_core.hardware.nvml import NvmlError
from amp_core.hardware.usable_gpus import usable_gpus
from amp_core.jobs import job_file, reaper
from amp_core.jobs.backends.base import Backend, Devices, Observed
from amp_core.jobs.job_file import Living, Record
from amp_core.schema import RunError
from amp_core.settings.resources import Resources
from amp_core.settings.training import TrainConfig

_children: dict[Path, subprocess.Popen[bytes]] = {}  # by folder: only the parent gets the exit code


class Local(Backend):
    """Processes of this machine."""

    name = "local"
    label = "This machine"

    def devices(self) -> Devices:
        """The GPUs that torch would see, `cuda:0` first, then the CPU."""
        cpu = ("cpu", "CPU")
        try:
            torch_version = metadata.version("torch")
        except metadata.PackageNotFoundError:
            return Devices((cpu,), "torch is not installed here")
        try:
            names = [gpu.name for gpu in usable_gpus()]
        except NvmlError as error:
            return Devices((cpu,), str(error))
        if not names:
            hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
            named = f"CUDA_VISIBLE_DEVICES={hidden!r} names no GPU"
            return Devices((cpu,), named if hidden is not None else "the driver knows no GPU")
        if "+cpu" in torch_version:
            return Devices((cpu,), f"torch {torch_version} is a CPU build, so {names[0]} stays unused")
        return Devices((*((f"cuda:{i}", f"{name} (cuda:{i})") for i, name in enumerate(names)), cpu))

    def device_of(self, config: TrainConfig, resources: Resources) -> str:  # noqa: ARG002 - it requests none here
        return device_of(config)

    def submit(self, folder: Path, record: Record) -> None:
        with job_file.lock:
            job_file.write(folder, record)
            with open(folder / job_file.CONSOLE_FILE, "ab") as console:
                child = subprocess.Popen(
                    [sys.executable, "-m", "amp_core.jobs.launcher", str(folder)],
                    stdin=subprocess.DEVNULL,
                    stdout=console,  # a file, not a pipe: it needs no reader, and its last lines outlive the process
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C in the app's terminal must not reach the training
                    env=os.environ | python_path() | {"PYTHONUNBUFFERED": "1"},  # unbuffered output
                )
            job_file.write(folder, dataclasses.replace(record, process=identity(child.pid)))
            _children[folder] = child

    def upkeep(self, folder: Path, record: Record) -> Record:
        """Reap the job if it ended, and kill it if its grace period is over."""
        alive = _alive(folder, record)
        if alive:
            if time.time() > reaper.kill_due_s(record):
                reaper.kill(record)
        elif folder in _children:
            record = reaper.record_end(folder, record, _children[folder].returncode)
            del _children[folder]
        elif alive is False and record.ended_s is None and os.access(folder, os.W_OK):
            record = reaper.record_end(folder, record, None)
        return record

    def observe(self, folder: Path, record: Record, others: Sequence[Living] | None) -> Observed:
        alive = _alive(folder, record)
        ahead = job_file.ahead_of(folder, record, others) if alive and not (folder / "run.json").exists() else []
        if not ahead:
            return Observed(alive)
        return Observed(alive, f"waiting for {record.device}: behind {ahead[-1][0]}", len(ahead))

    def request_stop(self, folder: Path, grace_s: float) -> None:
        _await_process(folder)
        with job_file.lock:
            record = job_file.read(folder)
            alive = job_file.is_alive(record)
            if alive is None:
                raise RunError(f"job={folder.name!r} runs on another machine; stop it there")
            if not alive or record.stop_requested_s is not None:
                return
            requested = dataclasses.replace(record, stop_requested_s=time.time(), stop_grace_s=grace_s)
            job_file.write(folder, requested)  # before the signal, so that the reason is on disk when the job ends
            try:
                reaper.send_stop(requested)
            except RunError:
                job_file.write(folder, record)
                raise


def device_of(config: TrainConfig) -> str:
    """The device that `config` will train on, as far as that is known without torch: `cpu`, `cuda:N` and so on."""
    if config.device == "auto":
        return "cuda:0" if _has_cuda() else "cpu"
    return f"{config.device}:0" if config.device in ACCELERATORS else config.device


def reap_removed() -> None:
    """Reap ended children whose folders were removed."""
    for folder, child in list(_children.items()):
        if not (folder / job_file.JOB_FILE).exists() and child.poll() is not None:
            del _children[folder]


def _alive(folder: Path, record: Record) -> bool | None:
    """Whether the job's process runs; None for a job of another machine. Of a child of this process the system says it:
    the record may not name its pid yet, and its start time no longer fits once the clock was set."""
    child = _children.get(folder)
    return child.poll() is None if child is not None else job_file.is_alive(record)


def _await_process(folder: Path) -> None:
    """Wait until the record names the job's process, which another program may be about to write."""
    while (record := job_file.read(folder)).process is None and job_file.is_alive(record):
        time.sleep(0.02)


def _has_cuda() -> bool:
    """Whether torch will find a CUDA device, without importing torch here."""
    try:
        if "+cpu" in metadata.version("torch"):
            return False
        return bool(usable_gpus())
    except (metadata.PackageNotFoundError, NvmlError):  # no torch; neither a driver nor a GPU that torch finds
        return False
