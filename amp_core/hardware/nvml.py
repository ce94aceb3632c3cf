"""Facts about GPUs from NVIDIA's driver (NVML, through nvidia-ml-py).

    >>> with Nvml() as nvml:
    ...     nvml.driver(), [gpu.name for gpu in nvml.gpus()]
    ('580.65.06', ['NVIDIA H200'])

Only this module and `gpu_state` call NVML, and all calls go through the `library` given to `Nvml`, by default `pynvml`,
so that tests can stand in for any generation of GPU.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

WORDS = {
    "NVML_ERROR_NOT_SUPPORTED": "this GPU does not report it",
    "NVML_ERROR_NO_PERMISSION": "this user lacks permission to read it",
    "NVML_ERROR_FUNCTION_NOT_FOUND": "the driver is too old for it",
    "NVML_ERROR_LIBRARY_NOT_FOUND": "no NVIDIA driver is installed",
    "NVML_ERROR_DRIVER_NOT_LOADED": "the NVIDIA driver is not loaded",
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": (
        "the driver and the NVML library have different versions; restart the machine"
    ),
    "NVML_ERROR_GPU_IS_LOST": "the GPU is lost: it fell off the bus or has failed",
    "NVML_ERROR_RESET_REQUIRED": "the GPU needs a reset",
    "NVML_ERROR_NOT_FOUND": "the driver does not know it",
    "NVML_ERROR_NO_DATA": "the driver has no data for it",
}
"""NVML's errors in words."""
_LOST = (
    "NVML_ERROR_GPU_IS_LOST",
    "NVML_ERROR_RESET_REQUIRED",
    "NVML_ERROR_UNINITIALIZED",
    "NVML_ERROR_DRIVER_NOT_LOADED",
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH",
)


class NvmlError(Exception):
    """NVML, or one of its devices, does not respond; the message says why."""


@dataclass(frozen=True)
class GpuFacts:
    """A GPU as the driver describes it; None for facts that it does not report."""

    name: str
    uuid: str | None
    memory_bytes: int | None
    capability: tuple[int, int] | None


class Nvml:
    """Context manager that initialises NVML and shuts it down. Raises `NvmlError` where there is none."""

    def __init__(self, library: Any = None) -> None:
        self.library = library if library is not None else _pynvml()

    def __enter__(self) -> "Nvml":
        try:
            self.library.nvmlInit()
        except self.library.NVMLError as error:
            raise NvmlError(self.why(error)) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Shut NVML down; harmless if the driver is gone."""
        try:
            self.library.nvmlShutdown()
        except self.library.NVMLError:  # nothing left to release
            return

    def why(self, error: Exception) -> str:
        """An `NVMLError` in words."""
        code = getattr(error, "value", None)
        return next((words for name, words in WORDS.items() if getattr(self.library, name) == code), str(error))

    def is_loss(self, error: Exception) -> bool:
        """Whether an `NVMLError` means that the whole device, and not only one value, is unavailable."""
        return getattr(error, "value", None) in [getattr(self.library, name) for name in _LOST]

    def query(self, name: str, *arguments: Any) -> Any:
        """The result of the function `name`; None if it fails or does not exist."""
        try:
            return getattr(self.library, name)(*arguments)
        except (self.library.NVMLError, AttributeError):
            return None

    def gpus(self) -> list[GpuFacts]:
        """All GPUs of the machine in the driver's order, which CUDA_VISIBLE_DEVICES does not change."""
        gpus = []
        for index in range(self.query("nvmlDeviceGetCount") or 0):
            handle = self.query("nvmlDeviceGetHandleByIndex", index)
            if handle is None:  # lost, or not this user's
                continue
            memory = self.query("nvmlDeviceGetMemoryInfo", handle)
            capability = self.query("nvmlDeviceGetCudaComputeCapability", handle)
            gpus.append(
                GpuFacts(
                    name=_text(self.query("nvmlDeviceGetName", handle)) or "unnamed GPU",
                    uuid=_text(self.query("nvmlDeviceGetUUID", handle)),
                    memory_bytes=int(memory.total) if memory is not None else None,
                    capability=(int(capability[0]), int(capability[1])) if capability is not None else None,
                )
            )
        return gpus

    def driver(self) -> str | None:
        """The driver's version, e.g. `580.65.06`."""
        return _text(self.query("nvmlSystemGetDriverVersion"))

    def cuda(self) -> str | None:
        """The newest CUDA that the driver can run, e.g. `13.0`."""
        version = self.query("nvmlSystemGetCudaDriverVersion_v2")
        return f"{version // 1000}.{version % 1000 // 10}" if version else None


def visible_gpus() -> list[GpuFacts]:
    """The GPUs that torch would see in this process, `cuda:0` first. Raises `NvmlError` as `Nvml` does."""
    with Nvml() as nvml:
        return visible(nvml.gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible(gpus: Sequence[GpuFacts], visible_devices: str | None) -> list[GpuFacts]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves visible, in the order of `cuda:N`.

    `visible_devices` is its value, None if it is not set. As in CUDA, an entry that names no GPU ends the list, and a
    MIG instance is the only device. Of an instance only the GPU's generation is known, and only if all GPUs are alike.
    """
    if visible_devices is None:
        return list(gpus)
    chosen: list[GpuFacts] = []
    for name in (part.strip() for part in visible_devices.split(",")):
        if name.startswith("MIG-") and gpus and not chosen:
            alike = len({gpu.name for gpu in gpus}) == 1
            kind = (f"{gpus[0].name}, MIG instance", gpus[0].capability) if alike else ("MIG instance", None)
            return [GpuFacts(kind[0], name, None, kind[1])]
        if name.isdecimal():
            match = gpus[int(name)] if int(name) < len(gpus) else None
        else:
            match = next((gpu for gpu in gpus if name and gpu.uuid and gpu.uuid.startswith(name)), None)
        if match is None:
            break
        chosen.append(match)
    return chosen


def _pynvml() -> Any:
    try:
        import pynvml
    except ImportError:
        raise NvmlError("the package nvidia-ml-py is not installed") from None
    return pynvml


def _text(value: Any) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
