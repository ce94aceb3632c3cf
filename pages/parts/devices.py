"""What a training process could run on here, asked of the driver and of the package list: torch is never imported."""

from importlib import metadata

import psutil
import pynvml
import streamlit as st

Device = tuple[str, str]


@st.cache_data(ttl=60, show_spinner=False)
def available() -> tuple[list[Device], str | None]:
    """Devices as (name for the training, words for people), and why there is no GPU among them where there is none."""
    cpu = ("cpu", "CPU")
    try:
        torch_version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return [cpu], "torch is not installed here"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return [cpu], "there is no NVIDIA driver here"
    except pynvml.NVMLError as error:
        return [cpu], f"no NVIDIA GPU answers ({error})"
    try:
        names = [str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i))) for i in _indices()]
    except pynvml.NVMLError as error:
        return [cpu], f"the NVIDIA driver answers with an error ({error})"
    finally:
        pynvml.nvmlShutdown()
    if not names:
        return [cpu], "the NVIDIA driver knows no GPU"
    if "+cpu" in torch_version:
        return [cpu], f"torch {torch_version} is a CPU build, so {names[0]} stays unused"
    return [*((f"cuda:{i}", f"{name} (cuda:{i})") for i, name in enumerate(names)), cpu], None


def _indices() -> range:
    return range(pynvml.nvmlDeviceGetCount())


@st.cache_data(ttl=60, show_spinner=False)
def memory_bytes(device: str) -> int | None:
    """All memory that the device `cpu` or `cuda:N` has; None where the driver does not say."""
    if device == "cpu":
        return int(psutil.virtual_memory().total)
    try:
        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(int(device.removeprefix("cuda:") or 0))
            return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
