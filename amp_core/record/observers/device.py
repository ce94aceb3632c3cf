"""Sampling the GPU while the training goes on: use, memory, power, heat, clocks, and how busy its tensor cores are.

    sampler = DeviceSampler(writer, torch.device("cuda:0"), interval_s=0.5)
    ...
    sampler.close()

A thread asks NVML and appends a row to `device`; the training thread is never waited for and never waits. What a GPU or
a driver does not tell is null, and one event says what is missing and why. On a CPU there is nothing to sample.
"""

import contextlib
import os
import threading
from collections.abc import Sequence
from typing import Any

import torch

from amp_core.hardware.gpu_state import Device, Reasons, find
from amp_core.hardware.nvml import Nvml, NvmlError
from amp_core.record.observer import Observer
from amp_core.schema import RunError
from amp_core.store.writer import RunWriter

SHORTEST_S = 0.2
"""NVML's counters need more than 100 ms between two samples (nvml.h); below this their shares are coarse."""
RETRY_S = 30.0
"""How long after the device was lost it is asked again."""
_PATIENCE_S = 1.0
"""How long the end of a run waits for a driver that does not answer; the thread is a daemon's and may be left."""


class DeviceSampler(Observer):
    """Writes one row of `device` every `interval_s` seconds, from now until `close`.

    `device` is where the model is; other than CUDA devices are not sampled. `library` stands in for `pynvml`, and
    `uuids` with `pci_bus_id` for what torch knows of the device. Raises `RunError` for an interval below 0.2 s.
    """

    def __init__(
        self,
        writer: RunWriter,
        device: torch.device,
        interval_s: float = 0.5,
        *,
        library: Any = None,
        uuids: Sequence[str] | None = None,
        pci_bus_id: str | None = None,
        retry_s: float = RETRY_S,
    ) -> None:
        if isinstance(interval_s, bool) or not isinstance(interval_s, int | float) or not interval_s >= SHORTEST_S:
            raise RunError(f"interval_s={interval_s!r} is too short or no time; give {SHORTEST_S} seconds or more")
        self._writer = writer
        self._index = device.index or 0
        self._interval_s = float(interval_s)
        self._retry_s = retry_s
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._told: set[str] = set()
        self._thread: threading.Thread | None = None
        if device.type != "cuda":
            return
        if uuids is None:
            try:
                uuids, pci_bus_id = addresses(device)
            except (RuntimeError, AssertionError) as error:  # CUDA cannot be asked: the training will meet it too
                self._tell(f"device samples: {error}")
                return
        if torch.version.hip is not None and library is None:
            self._tell("device samples: NVML is NVIDIA's, and this torch is built for ROCm")
            return
        try:
            self._nvml = Nvml(library)  # imports pynvml here, not in the thread: a fork must not find it half imported
        except NvmlError as error:
            self._tell(f"device samples: {error}")
            return
        self._uuids, self._pci_bus_id = uuids, pci_bus_id
        self._thread = threading.Thread(target=self._run, name="ampscope-device", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more samples. In a forked child, which has no such thread, nothing."""
        if self._thread is None or self._pid != os.getpid():
            return
        self._stop.set()
        self._thread.join(_PATIENCE_S)
        self._thread = None

    def _run(self) -> None:
        lost_at = None
        while not self._stop.is_set():
            answered = False
            try:
                with self._nvml as nvml:
                    device = find(nvml, self._uuids, self._pci_bus_id)
                    try:
                        for _ in self._samples(device):
                            if lost_at is not None:
                                away = self._writer.time_s() - lost_at
                                self._writer.event("phase change", "device samples", f"again, after {away:.0f} s")
                            answered, lost_at = True, None
                    finally:
                        device.close()
            except NvmlError as error:
                if not answered and lost_at is None:  # it never answered: nothing will change that
                    self._tell(f"device samples: {error}")
                    return
                if answered:
                    self._tell(f"device samples from now on: {error}; asked again every {self._retry_s:g} s")
                    lost_at = self._writer.time_s()
                self._stop.wait(self._retry_s)
            except Exception as error:  # whatever it is, it stays in this thread and the run says so
                self._tell(f"device samples from now on: {type(error).__name__}: {error}")
                return

    def _samples(self, device: Device) -> Any:
        """A row each `interval_s` until the end; yields after each. Raises `NvmlError` when the device is lost."""
        missing: Reasons = {}
        try:
            first = True
            while not self._stop.is_set():
                values, missing = device.read()
                columns = {column: [value] for column, value in values.items()}
                self._writer.append("device", {"time_s": [self._writer.time_s()], "index": [self._index]} | columns)
                yield
                if not first:  # counters have nothing to say before their second sample
                    self._tell_missing(missing)
                first = False
                self._stop.wait(self._interval_s)
        finally:
            self._tell_missing(missing)

    def _tell_missing(self, missing: Reasons) -> None:
        """Say once of each column why it stays empty, in one event."""
        new: dict[str, list[str]] = {}
        for column, reason in missing.items():
            if column not in self._told:
                new.setdefault(reason, []).append(column)
        if new:
            self._told |= missing.keys()
            self._tell("; ".join(f"{', '.join(columns)}: {reason}" for reason, columns in new.items()))

    def _tell(self, detail: str) -> None:
        with contextlib.suppress(OSError):  # a full disk is the training thread's to report
            self._writer.event("warning", name="not recorded", detail=detail)


def addresses(device: torch.device) -> tuple[list[str], str | None]:
    """UUIDs and PCI address by which NVML may know a CUDA device.

    NVML numbers all GPUs of the machine and torch those of CUDA_VISIBLE_DEVICES, so the numbers do not do. Where that
    names a MIG instance, the process has that one alone.
    """
    properties: Any = torch.cuda.get_device_properties(device)
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    uuids = [name for name in visible[:1] if name.startswith("MIG-")]
    if (uuid := getattr(properties, "uuid", None)) is not None:
        uuids += [f"GPU-{uuid}", f"MIG-{uuid}"]
    parts: list[Any] = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in parts:  # not every torch tells
        return uuids, None
    return uuids, "{:08x}:{:02x}:{:02x}.0".format(*parts)
