"""The current state of one GPU: utilisation, memory, power, temperature, clocks, and the counters of its tensor cores.

    with Nvml() as nvml:
        device = find(nvml, ["GPU-1f0c…"])
        values, missing = device.read()       # {"power_w": 312.0, …}, {"temperature_c": "this GPU does not report it"}

A value that cannot be read is absent from `values`, and `missing` gives the reason: no value is a guess, or a zero for
"unknown". Percent becomes a fraction from 0 to 1, milliwatts become watts.

GPM, the counters of Hopper and newer (nvml.h, "GPU Performance Monitoring"), gives fractions of the time between two
samples of one device or MIG instance, over all its processes. FP8 and TF32 have no counter of their own: they are part
of `tensor_active_frac`. NVML requires more than 100 ms between samples.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from amp_core.hardware.nvml import WORDS, Nvml, NvmlError

Values = dict[str, Any]
Reasons = dict[str, str]

_THROTTLE = (  # nvml.h, "Clocks event reasons"
    (0x1, "idle"),
    (0x2, "set application clocks"),
    (0x4, "power cap"),
    (0x8, "hardware slowdown"),
    (0x10, "sync boost"),
    (0x20, "software thermal slowdown"),
    (0x40, "hardware thermal slowdown"),
    (0x80, "external power brake"),
    (0x100, "display clocks"),
    (0x200, "board limit"),
    (0x400, "reliability limit"),
)
GPM_METRICS = {
    "sm_active_frac": "NVML_GPM_METRIC_SM_UTIL",
    "tensor_active_frac": "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
    "hmma_active_frac": "NVML_GPM_METRIC_HMMA_TENSOR_UTIL",
    "dram_active_frac": "NVML_GPM_METRIC_DRAM_BW_UTIL",
}
"""Column of `device` for each counter."""
_NO_VALUE = 2**63
"""Values from here on mean "no value": NVML sets all bits."""


def find(nvml: Nvml, uuids: Sequence[str], pci_bus_id: str | None = None) -> "Device":
    """The device of the first UUID that the driver knows (`GPU-…` or `MIG-…`), else the one at the PCI address.

    Raises `NvmlError` if the driver knows none of them.
    """
    reason = "neither UUID nor PCI address of the device is known"
    addresses = [("nvmlDeviceGetHandleByUUID", uuid) for uuid in uuids]
    addresses += [("nvmlDeviceGetHandleByPciBusId", pci_bus_id)] if pci_bus_id else []
    for function, address in addresses:
        try:
            return Device(nvml, getattr(nvml.library, function)(address))
        except nvml.library.NVMLError as error:
            reason = nvml.why(error)
    raise NvmlError(reason)


class Device:
    """One GPU, or one MIG instance: some values are of the instance, others exist only for the whole GPU."""

    def __init__(self, nvml: Nvml, handle: Any) -> None:
        self._nvml = nvml
        self._own = handle
        self._whole = handle
        self._instance: int | None = None
        self.ambiguous = False
        """MIG is on, and which of several instances to read is not known."""
        self._find_instance()
        self._gpm: Gpm | None = None

    def _find_instance(self) -> None:
        mig = self._nvml.query("nvmlDeviceIsMigDeviceHandle", self._own)
        if mig is not None and int(getattr(mig, "value", mig)):
            self._whole = self._nvml.query("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", self._own) or self._own
        else:
            mode = self._nvml.query("nvmlDeviceGetMigMode", self._own)
            if mode is None or mode[0] != 1:
                return
            there = range(self._nvml.query("nvmlDeviceGetMaxMigDeviceCount", self._own) or 0)
            instances = [self._nvml.query("nvmlDeviceGetMigDeviceHandleByIndex", self._own, i) for i in there]
            known = [one for one in instances if one is not None]
            if len(known) != 1:
                self.ambiguous = True
                return
            self._own = known[0]
        self._instance = self._nvml.query("nvmlDeviceGetGpuInstanceId", self._own)

    def read(self) -> tuple[Values, Reasons]:
        """All values that can be read now, by column of `device`, and the reason for each missing one.

        Raises `NvmlError` if the device as a whole does not respond.
        """
        values: Values = {}
        missing: Reasons = {}
        for columns, read in _READINGS:
            self._take(columns, read, values, missing)
        self._take(tuple(GPM_METRICS), lambda device: device._counters(missing), values, missing)
        if not values:
            raise NvmlError(next(iter(missing.values())))
        return values, missing

    def _take(
        self, columns: tuple[str, ...], read: Callable[["Device"], Values], values: Values, missing: Reasons
    ) -> None:
        library = self._nvml.library
        try:
            reading = read(self)
        except library.NVMLError as error:
            if self._nvml.is_loss(error):
                raise NvmlError(self._nvml.why(error)) from None
            missing.update(dict.fromkeys(columns, self._nvml.why(error)))
            return
        except _Missing as reason:
            missing.update(dict.fromkeys(columns, str(reason)))
            return
        for column, value in reading.items():
            if isinstance(value, str | int) or math.isfinite(value):
                values[column] = value
            else:
                missing[column] = "the driver returned a non-finite number"

    def _first_supported(self, *calls: tuple[Any, ...]) -> Any:
        """The result of the first function that both the library and the driver have."""
        library = self._nvml.library
        for name, *arguments in calls:
            if not hasattr(library, name):  # nvidia-ml-py removes deprecated functions
                continue
            try:
                return getattr(library, name)(*arguments)
            except library.NVMLError as error:
                if error.value not in (
                    library.NVML_ERROR_FUNCTION_NOT_FOUND,
                    library.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
                ):
                    raise
        raise _Missing(WORDS["NVML_ERROR_FUNCTION_NOT_FOUND"])

    def _utilisation(self) -> Values:
        return {"gpu_util_frac": self._nvml.library.nvmlDeviceGetUtilizationRates(self._whole).gpu / 100}

    def _memory(self) -> Values:
        if self.ambiguous:
            raise _Missing(_AMBIGUOUS)
        name = "nvmlDeviceGetMemoryInfo"
        info = self._first_supported((name, self._own, self._nvml.library.nvmlMemory_v2), (name, self._own))
        if not 0 < info.total < _NO_VALUE or info.used >= _NO_VALUE:
            raise _Missing(WORDS["NVML_ERROR_NOT_SUPPORTED"])
        return {"memory_used_bytes": int(info.used), "memory_total_bytes": int(info.total)}

    def _power(self) -> Values:
        return {"power_w": self._nvml.library.nvmlDeviceGetPowerUsage(self._whole) / 1000}

    def _power_limit(self) -> Values:
        return {"power_limit_w": self._nvml.library.nvmlDeviceGetEnforcedPowerLimit(self._whole) / 1000}

    def _temperature(self) -> Values:
        sensor = self._nvml.library.NVML_TEMPERATURE_GPU
        newer, older = "nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature"
        return {
            "temperature_c": float(self._first_supported((newer, self._whole, sensor), (older, self._whole, sensor)))
        }

    def _sm_clock(self) -> Values:
        library = self._nvml.library
        return {"sm_clock_mhz": float(library.nvmlDeviceGetClockInfo(self._whole, library.NVML_CLOCK_SM))}

    def _memory_clock(self) -> Values:
        library = self._nvml.library
        return {"mem_clock_mhz": float(library.nvmlDeviceGetClockInfo(self._whole, library.NVML_CLOCK_MEM))}

    def _throttle(self) -> Values:
        names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
        return {"throttle": throttle_words(int(self._first_supported(*((name, self._whole) for name in names))))}

    def _counters(self, missing: Reasons) -> Values:
        if self.ambiguous:
            raise _Missing(_AMBIGUOUS)
        if self._gpm is None:
            self._gpm = Gpm(self._nvml, self._whole, self._instance)
        values, unread = self._gpm.read()
        missing.update(unread)
        return values

    def close(self) -> None:
        """Free the buffers of the counters."""
        if self._gpm is not None:
            self._gpm.close()
            self._gpm = None


_READINGS: tuple[tuple[tuple[str, ...], Callable[[Device], Values]], ...] = (
    (("gpu_util_frac",), Device._utilisation),
    (("memory_used_bytes", "memory_total_bytes"), Device._memory),
    (("power_w",), Device._power),
    (("power_limit_w",), Device._power_limit),
    (("temperature_c",), Device._temperature),
    (("sm_clock_mhz",), Device._sm_clock),
    (("mem_clock_mhz",), Device._memory_clock),
    (("throttle",), Device._throttle),
)


class Gpm:
    """The counters of one device or MIG instance, between consecutive readings."""

    def __init__(self, nvml: Nvml, device: Any, instance: int | None) -> None:
        self._nvml = nvml
        self._device = device
        self._instance = instance
        self._before: Any = None
        self._spare: Any = None
        self._supported: bool | None = None

    def read(self) -> tuple[Values, Reasons]:
        """Fractions of the time since the last reading, none at the first; and the reason for each missing one.

        Raises the library's error, or `_Missing`, if no counter can be read.
        """
        library = self._nvml.library
        if self._supported is None:
            self._supported = bool(library.nvmlGpmQueryDeviceSupport(self._device).isSupportedDevice)
        if not self._supported:
            raise _Missing("tensor-core counters need an NVIDIA GPU of the Hopper generation or newer")
        if self._spare is None:
            self._spare = library.nvmlGpmSampleAlloc()
        if self._instance is None:
            library.nvmlGpmSampleGet(self._device, self._spare)
        else:
            library.nvmlGpmMigSampleGet(self._device, self._instance, self._spare)
        self._before, self._spare = self._spare, self._before
        return self._between(self._spare, self._before) if self._spare is not None else ({}, {})

    def _between(self, before: Any, now: Any) -> tuple[Values, Reasons]:
        library = self._nvml.library
        request = library.c_nvmlGpmMetricsGet_t()
        request.version = library.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(GPM_METRICS)
        request.sample1, request.sample2 = before, now
        metrics = [(request.metrics[i], column) for i, column in enumerate(GPM_METRICS)]
        for metric, column in metrics:
            metric.metricId = getattr(library, GPM_METRICS[column])
        library.nvmlGpmMetricsGet(request)
        values: Values = {}
        unread: Reasons = {}
        for metric, column in metrics:
            if metric.nvmlReturn == library.NVML_SUCCESS:
                # Counters are read a moment apart, so their ratio may exceed 1 slightly.
                values[column] = min(metric.value / 100, 1.0) if not metric.value < 0 else math.nan
            else:
                unread[column] = self._nvml.why(library.NVMLError(metric.nvmlReturn))
        return values, unread

    def close(self) -> None:
        """Free both buffers."""
        for buffer in (self._before, self._spare):
            if buffer is not None:
                self._nvml.query("nvmlGpmSampleFree", buffer)  # a lost driver has freed them already
        self._before = self._spare = None


class _Missing(Exception):  # noqa: N818 - not a failure: the reason why a value is missing
    pass


_AMBIGUOUS = "MIG is on and the instance that this process uses is unknown; name one in CUDA_VISIBLE_DEVICES"


def throttle_words(reasons: int) -> str:
    """NVML's throttle bits in words; `none` for no bit."""
    named = [words for bit, words in _THROTTLE if reasons & bit]
    rest = reasons & ~sum(bit for bit, _ in _THROTTLE)
    return ", ".join([*named, *([f"reason {rest:#x}"] if rest else [])]) or "none"
