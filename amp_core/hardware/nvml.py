"""What NVIDIA's driver tells of a GPU (NVML, by way of nvidia-ml-py): the one place that calls it.

    >>> with Nvml() as nvml:
    ...     nvml.driver(), [gpu.name for gpu in nvml.gpus()]
    ('580.65.06', ['NVIDIA H200'])

This module and `_gpu.py` are the only places that call it, and all calls go through the `library` that `Nvml` is given,
by default `pynvml`: so tests answer as any generation of GPU would.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

WORDS = {
    "NVML_ERROR_NOT_SUPPORTED": "this GPU does not report it",
    "NVML_ERROR_NO_PERMISSION": "this user may not read it",
    "NVML_ERROR_FUNCTION_NOT_FOUND": "the driver is too old for it",
    "NVML_ERROR_LIBRARY_NOT_FOUND": "there is no NVIDIA driver here",
    "NVML_ERROR_DRIVER_NOT_LOADED": "the NVIDIA driver is not loaded",
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": "driver and NVML library are of different versions; restart the machine",
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
    """NVML, or one device of it, cannot be asked at all; the message says why."""


@dataclass(frozen=True)
class GpuFacts:
    """What a GPU is, as the driver knows it. None where it does not say."""

    name: str
    uuid: str | None
    memory_bytes: int | None
    capability: tuple[int, int] | None


class Nvml:
    """NVML from its start to its end; a context. Raises `NvmlError` where there is none."""

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
        """Let go of NVML; harmless where the driver has gone away by itself."""
        try:
            self.library.nvmlShutdown()
        except self.library.NVMLError:  # nothing is left to be let go of
            return

    def why(self, error: Exception) -> str:
        """An `NVMLError` in words."""
        code = getattr(error, "value", None)
        return next((words for name, words in WORDS.items() if getattr(self.library, name) == code), str(error))

    def is_loss(self, error: Exception) -> bool:
        """Whether an `NVMLError` means that the whole device, and not one value, cannot be had."""
        return getattr(error, "value", None) in [getattr(self.library, name) for name in _LOST]

    def answer(self, name: str, *arguments: Any) -> Any:
        """What the function `name` gives; None where it fails or does not exist."""
        try:
            return getattr(self.library, name)(*arguments)
        except (self.library.NVMLError, AttributeError):
            return None

    def gpus(self) -> list[GpuFacts]:
        """All GPUs of the machine in the driver's order, which CUDA_VISIBLE_DEVICES does not change."""
        found = []
        for index in range(self.answer("nvmlDeviceGetCount") or 0):
            handle = self.answer("nvmlDeviceGetHandleByIndex", index)
            if handle is None:  # lost, or not this user's
                continue
            memory = self.answer("nvmlDeviceGetMemoryInfo", handle)
            capability = self.answer("nvmlDeviceGetCudaComputeCapability", handle)
            found.append(
                GpuFacts(
                    name=_text(self.answer("nvmlDeviceGetName", handle)) or "unnamed GPU",
                    uuid=_text(self.answer("nvmlDeviceGetUUID", handle)),
                    memory_bytes=int(memory.total) if memory is not None else None,
                    capability=(int(capability[0]), int(capability[1])) if capability is not None else None,
                )
            )
        return found

    def driver(self) -> str | None:
        """The driver's version, e.g. `580.65.06`."""
        return _text(self.answer("nvmlSystemGetDriverVersion"))

    def cuda(self) -> str | None:
        """The newest CUDA that the driver can run, e.g. `13.0`."""
        version = self.answer("nvmlSystemGetCudaDriverVersion_v2")
        return f"{version // 1000}.{version % 1000 // 10}" if version else None


def visible(gpus: Sequence[GpuFacts], asked: str | None) -> list[GpuFacts]:
    """Those of the machine's GPUs that CUDA_VISIBLE_DEVICES leaves to a program, in the order of its `cuda:N`.

    `asked` is its value, None where it is not set. As in CUDA, what names no GPU ends the list, and a MIG instance is
    alone. Of an instance only its GPU's generation is known here, and that where all GPUs are alike.
    """
    if asked is None:
        return list(gpus)
    found: list[GpuFacts] = []
    for name in (part.strip() for part in asked.split(",")):
        if name.startswith("MIG-") and gpus and not found:
            alike = len({gpu.name for gpu in gpus}) == 1
            kind = (f"{gpus[0].name}, MIG instance", gpus[0].capability) if alike else ("MIG instance", None)
            return [GpuFacts(kind[0], name, None, kind[1])]
        if name.isdecimal():
            match = gpus[int(name)] if int(name) < len(gpus) else None
        else:
            match = next((gpu for gpu in gpus if name and gpu.uuid and gpu.uuid.startswith(name)), None)
        if match is None:
            break
        found.append(match)
    return found


def _pynvml() -> Any:
    try:
        import pynvml
    except ImportError:
        raise NvmlError("the package nvidia-ml-py is not installed") from None
    return pynvml


def _text(value: Any) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
