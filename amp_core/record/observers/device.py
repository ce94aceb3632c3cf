"""Samples the GPU while the training goes on: use, memory, power, heat, clocks, and how busy its tensor cores are.

    sampler = DeviceSampler(writer, torch.device("cuda:0"), interval_s=0.5)
    ...
    sampler.close()

A thread asks the source that the device's backend has (on CUDA NVML) and appends a row to `device`; the training thread
is never waited for and never waits. What a GPU or a driver does not tell is null, and one event says what is missing
and why. On a CPU there is nothing to sample.
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

SHORTEST_S = 0.2
"""NVML's counters need more than 100 ms between two samples (nvml.h); below this their shares are coarse."""
RETRY_S = 30.0
"""How long after the device was lost it is asked again."""
_PATIENCE_S = 1.0
"""How long the end of a run waits for a driver that does not answer; the thread is a daemon's and may be left."""


class DeviceSampler(Observer):
    """Writes one row of `device` every `interval_s` seconds, from now until `close`.

    `device` is where the model is; `source` stands in for that of its backend. Raises `RunError` for an interval below
    0.2 s.
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
        try:
            source = source if source is not None else backend_of(device).sample_source()
        except SampleError as error:
            self._tell(f"device samples: {error}")
            return
        if source is not None:
            self._thread = threading.Thread(target=self._run, args=(source,), name="ampscope-device", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Take no more samples. In a forked child, which has no such thread, nothing."""
        if self._thread is None or self._pid != os.getpid():
            return
        self._stop.set()
        self._thread.join(_PATIENCE_S)
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
                if not first:  # counters have nothing to say before their second sample
                    self._tell_missing(missing)
                first = False
                self._stop.wait(self._interval_s)
        finally:
            self._tell_missing(missing)

    def _tell_missing(self, missing: dict[str, str]) -> None:
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
