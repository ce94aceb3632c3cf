"""The devices that a training process could use here. torch is asked in a process of its own, if at all."""

import os
import shutil
from importlib import metadata

import psutil
import streamlit as st

from amp_core.hardware.nvml import NvmlError
from amp_core.hardware.usable_gpus import usable_gpus
from pages.parts import words

Device = tuple[str, str]
AMPERE = (8, 0)
"""Compute capability from which on a GPU supports TF32."""


@st.cache_data(ttl=60, show_spinner=False)
def available() -> tuple[list[Device], str | None]:
    """Devices as (name for the training, label), and why there is no GPU among them if there is none."""
    cpu = ("cpu", "CPU")
    try:
        torch_version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return [cpu], "torch is not installed here"
    try:
        names = [gpu.name for gpu in usable_gpus()]
    except NvmlError as error:
        return [cpu], str(error)
    if not names:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        return [
            cpu
        ], f"CUDA_VISIBLE_DEVICES={hidden!r} names no GPU" if hidden is not None else "the driver knows no GPU"
    if "+cpu" in torch_version:
        return [cpu], f"torch {torch_version} is a CPU build, so {names[0]} stays unused"
    return [*((f"cuda:{i}", f"{name} (cuda:{i})") for i, name in enumerate(names)), cpu], None


@st.cache_data(ttl=60, show_spinner=False)
def memory_bytes(device: str) -> int | None:
    """The memory of the device `cpu` or `cuda:N`; None if the driver does not report it."""
    if device == "cpu":
        return int(psutil.virtual_memory().total)
    number = int(device.removeprefix("cuda:") or 0)
    try:
        usable = usable_gpus()
    except NvmlError:  # `available` gives the reason
        return None
    return usable[number].memory_bytes if number < len(usable) else None


def no_compiler() -> str | None:
    """Why `torch.compile`, which needs a C++ compiler, cannot work here; None if it can."""
    if any(shutil.which(name) for name in (os.environ.get("CXX") or "c++", "g++", "clang++")):
        return None
    return "There is no C++ compiler here, which torch.compile needs (Debian: `apt-get install g++`)."


def no_tf32(device: str | None) -> str | None:
    """Why TF32 would be FP32 on a device of `available` (None: the first one); None if the device supports TF32."""
    chosen = device or available()[0][0][0]
    if chosen.startswith("cuda"):
        try:
            usable = usable_gpus()
        except NvmlError:  # `available` gives the reason
            return None
        capability = next((gpu.capability for gpu in usable[int(chosen.partition(":")[2] or 0) :]), None)
        if capability is None or capability >= AMPERE:
            return None
    name = words.escape(dict(available()[0])[chosen])
    return f"TF32 is not offered on {name}: only NVIDIA GPUs from Ampere on have it."


def one_gpu(device: str | None) -> str | None:
    """Why several processes, each with its own GPU, cannot train on a device; None if they can."""
    cuda = [name for name, _ in available()[0] if name.startswith("cuda")]
    if (device or available()[0][0][0]).startswith("cuda") and len(cuda) < 2:
        return "Each process needs a GPU of its own, and there is only one."
    return None
