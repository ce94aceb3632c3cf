"""Samples the GPU during training: utilization, memory, power, temperature, clocks and tensor core activity.

    sampler = DeviceSampler(writer, torch.device("cuda:0"), interval_s=0.5)
    ...
    sampler.close()

A thread reads the backend's sample source (NVML on CUDA) and appends a row to `device`; it and the training thread
never wait for each other. Values that a GPU or driver does not provide are null, and one event says which and why. On a
CPU nothing is sampled.
"""

import contextlib
import os
import threading
from collections.abc import Iterator

import torch

from amp_core.record.backends import backend_of
from amp_core.record.backends.base import Sampled, SampleError, SampleSource
from amp_core.record.observer import Observer
from amp_core.schema import RunError
from amp_core.store.writer import RunWriter
from amp_core.text.errors import in_one_line

MIN_INTERVAL_S = 0.2
"""NVML's counters need more than 100 ms between two samples (nvml.h); below this their shares are coarse."""
RETRY_S = 30.0
"""Time after which a lost device is queried again."""
_JOIN_TIMEOUT_S = 1.0
"""Time that the end of a run waits for a driver that does not answer. The thread is a daemon, so it may stay."""


class DeviceSampler(Observer):
    """Writes one row of `device` every `interval_s` seconds, from now until `close`.

    `device` is the model's; `source` replaces its backend's sample source. Raises `RunError` for an interval below 0.2
    s.
    """

    def __init__(
        self,
        writer: RunWriter,
        device: torch.device,
        interval_s: float = 0.5,
        *,
        source: SampleSource | None = None,
        retry_s: float = RETRY_S,
    ) -> None:
        if isinstance(interval_s, bool) or not isinstance(interval_s, int | float) or not interval_s >= MIN_INTERVAL_S:
            raise RunError(f"interval_s={interval_s!r} is not a number of seconds of at least {MIN_INTERVAL_S}")
        self._writer = writer
        self._index = device.index or 0
        self._interval_s = float(interval_s)
        self._retry_s = retry_s
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._reported: set[str] = set()
        self._thread: threading.Thread | None = None
        try:
            source = source if source is not None else backend_of(device).sample_source()
        except SampleError as error:
            self._report(f"device samples: {error}")
            return
        if source is not None:
            self._thread = threading.Thread(target=self._run, args=(source,), name="ampscope-device", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop sampling. In a forked child, which does not have the thread, this does nothing."""
        if self._thread is None or self._pid != os.getpid():
            return
        self._stop.set()
        self._thread.join(_JOIN_TIMEOUT_S)
        self._thread = None

    def _run(self, source: SampleSource) -> None:
        lost_at = None
        while not self._stop.is_set():
            answered = False
            try:
                with source.opened() as device:
                    for _ in self._samples(device):
                        if lost_at is not None:
                            away = self._writer.time_s() - lost_at
                            self._writer.event("phase change", "device samples", f"again, after {away:.0f} s")
                        answered, lost_at = True, None
            except SampleError as error:
                if not answered and lost_at is None:  # it never answered, so retrying is useless
                    self._report(f"device samples: {error}")
                    return
                if answered:
                    self._report(f"device samples from now on: {error}; asked again every {self._retry_s:g} s")
                    lost_at = self._writer.time_s()
                self._stop.wait(self._retry_s)
            except Exception as error:  # reported as an event, never propagated
                self._report(f"device samples from now on: {in_one_line(error)}")
                return

    def _samples(self, device: Sampled) -> Iterator[None]:
        """A row each `interval_s` until the end; yields after each. Raises `SampleError` when the device is lost."""
        missing: dict[str, str] = {}
        try:
            first = True
            while not self._stop.is_set():
                values, missing = device.read()
                columns = {column: [value] for column, value in values.items()}
                self._writer.append("device", {"time_s": [self._writer.time_s()], "index": [self._index]} | columns)
                yield
                if not first:  # counters have no value before their second sample
                    self._report_missing(missing)
                first = False
                self._stop.wait(self._interval_s)
        finally:
            self._report_missing(missing)

    def _report_missing(self, missing: dict[str, str]) -> None:
        """Report once for each column why it stays empty, in one event."""
        new: dict[str, list[str]] = {}
        for column, reason in missing.items():
            if column not in self._reported:
                new.setdefault(reason, []).append(column)
        if new:
            self._reported |= missing.keys()
            self._report("; ".join(f"{', '.join(columns)}: {reason}" for reason, columns in new.items()))

    def _report(self, detail: str) -> None:
        with contextlib.suppress(OSError):  # a full disk is the training thread's to report
            self._writer.event("warning", name="not recorded", detail=detail)
