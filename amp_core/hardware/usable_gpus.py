"""The GPUs that a training would see, determined without importing torch in this process.

    >>> [gpu.name for gpu in usable_gpus()]         # `cuda:0` first
    ['NVIDIA H200']

The driver knows them at once. Where it does not answer (AMD's GPUs, a container without NVML), torch is queried, in a
process of its own.
"""

import functools
import json
import os
import subprocess
import sys
from importlib import metadata

from amp_core.hardware.child_environment import python_path
from amp_core.hardware.nvml import GpuFacts, NvmlError, visible_gpus

TIMEOUT_S = 60.0
"""For importing torch on a slow disk."""


def usable_gpus() -> list[GpuFacts]:
    """GPUs in the order of `cuda:N`. Raises `NvmlError` if the driver does not answer and torch knows none either."""
    try:
        return visible_gpus()
    except NvmlError:
        if gpus := torch_gpus():
            return list(gpus)
        raise


@functools.cache
def torch_gpus() -> tuple[GpuFacts, ...]:
    """Those that torch finds; none if it is not installed or built for CPUs alone."""
    try:
        if "+cpu" in metadata.version("torch"):
            return ()
    except metadata.PackageNotFoundError:
        return ()
    command = [sys.executable, "-m", "amp_core", "env", "--json"]
    try:
        done = subprocess.run(
            command, env=os.environ | python_path(), capture_output=True, timeout=TIMEOUT_S, check=True, text=True
        )
        gpus = json.loads(done.stdout)["gpus"]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError):  # a torch that cannot be imported
        return ()
    return tuple(
        GpuFacts(gpu["name"], None, gpu["memory_bytes"], _capability(gpu["capability"]))
        for gpu in gpus
        if gpu["usable"]
    )


def _capability(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    major, _, minor = text.partition(".")
    return int(major), int(minor)
