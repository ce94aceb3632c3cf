# ruff: noqa: N802 - the names are those of NVML
"""A fake NVML that answers like GPUs of each generation, or like broken ones.

    nvml = FakeNvml(HOPPER)
    DeviceSampler(writer, torch.device("cuda:0"), source=NvmlSource(["GPU-hopper"], library=nvml))
    nvml.lose(); nvml.find_again()

Constants, structures and error classes are those of the installed `pynvml`; only its functions are replaced; a function
that is not replaced fails as it does without a driver.
"""

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml


@dataclass(frozen=True)
class Card:
    """The values that a GPU returns. A value that is an `NVML_ERROR_…` name is raised instead."""

    name: str
    capability: tuple[int, int]
    gpu: Any = 93
    used: Any = 30 * 2**30
    total: Any = 80 * 2**30
    power: Any = 412_345
    limit: Any = 700_000
    temperature: Any = 61
    sm_clock: Any = 1980
    mem_clock: Any = 2619
    reasons: Any = 0x4
    gpm: Any = False
    """Whether GPM is supported, or the error of asking."""
    counters: dict[int, Any] = field(default_factory=lambda: {2: 88.0, 5: 41.0, 7: 40.5, 10: 33.0})
    """Percent by number of the metric; an error's name for one that fails."""
    old_driver: bool = False
    """Lacks what drivers before R535 lack."""
    mig: tuple[str, ...] = ()
    """UUIDs of its MIG instances."""

    @property
    def uuid(self) -> str:
        return f"GPU-{self.name.split()[-1].lower()}"


NO = "NVML_ERROR_NOT_SUPPORTED"
PASCAL = Card("Tesla P100", (6, 0), gpm=NO, old_driver=True)
VOLTA = Card("Tesla V100", (7, 0), gpm=False)
GTX16 = Card(
    "NVIDIA GeForce GTX1660", (7, 5), limit=NO, gpm="NVML_ERROR_FUNCTION_NOT_FOUND", total=6 * 2**30, used=2**30
)
AMPERE = Card("NVIDIA A100", (8, 0), gpm=False)
ADA = Card("NVIDIA L4", (8, 9), gpm=False, reasons=0x4 | 0x20)
HOPPER = Card("NVIDIA H200", (9, 0), gpm=True, reasons=0)
BLACKWELL = Card("NVIDIA B200", (10, 0), gpm=True, counters={2: 100.3, 5: 71.0, 7: NO, 10: math.nan})
MIG = Card("NVIDIA H100-MIG", (9, 0), gpu=NO, gpm=True, mig=("MIG-one", "MIG-two"))
ONE_MIG = Card("NVIDIA H100-ONE", (9, 0), gpu=NO, gpm=True, mig=("MIG-only",))
VGPU = Card("GRID V100D-8Q", (7, 0), power=NO, limit=NO, temperature=NO, sm_clock=NO, mem_clock=NO, reasons=NO, gpm=NO)
FORBIDDEN = Card("NVIDIA H100", (9, 0), gpm=True, counters=dict.fromkeys((2, 5, 7, 10), "NVML_ERROR_NO_PERMISSION"))
SPARK = Card("NVIDIA GB10", (12, 1), total=NO, used=NO, gpm=False)
CARDS = (PASCAL, VOLTA, GTX16, AMPERE, ADA, HOPPER, BLACKWELL, MIG, ONE_MIG, VGPU, FORBIDDEN, SPARK)


@dataclass(frozen=True)
class Handle:
    """A GPU, or a MIG instance of one."""

    card: Card
    mig: int | None = None


class FakeNvml:
    """Stands in for the module `pynvml` on a machine with `cards`."""

    def __init__(self, *cards: Card, init: str | None = None) -> None:
        self.cards = cards
        self.init = init
        self.lost: str | None = None
        self.open = 0
        self.buffers: set[int] = set()
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:  # functions that are not replaced
        return getattr(pynvml, name)

    def lose(self, error: str = "NVML_ERROR_GPU_IS_LOST") -> None:
        self.lost = error

    def find_again(self) -> None:
        self.lost = None

    def _give(self, what: str, value: Any) -> Any:
        self.calls.append(what)
        if not self.open:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        if self.lost:
            raise pynvml.NVMLError(getattr(pynvml, self.lost))
        return self._or_raise(value)

    def _or_raise(self, value: Any) -> Any:
        if isinstance(value, str) and value.startswith("NVML_ERROR_"):
            raise pynvml.NVMLError(getattr(pynvml, value))
        return value

    def _missing(self, card: Card, what: str) -> None:
        if card.old_driver:
            self._give(what, "NVML_ERROR_FUNCTION_NOT_FOUND")

    # the session

    def nvmlInit(self) -> None:
        self._or_raise(self.init)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return self._give("driver", "580.65.06")

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return self._give("cuda", 13000)

    def nvmlDeviceGetCount(self) -> int:
        return self._give("count", len(self.cards))

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Handle:
        return self._give("handle", Handle(self.cards[index]))

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Handle:
        for card in self.cards:
            if uuid == card.uuid:
                return self._give("uuid", Handle(card))
            if uuid in card.mig:
                return self._give("uuid", Handle(card, card.mig.index(uuid)))
        return self._give("uuid", "NVML_ERROR_NOT_FOUND")

    def nvmlDeviceGetHandleByPciBusId(self, address: str) -> Handle:
        place = int(address.split(":")[1], 16)
        return self._give("pci", Handle(self.cards[place]) if place < len(self.cards) else "NVML_ERROR_NOT_FOUND")

    # one device

    def nvmlDeviceGetName(self, handle: Handle) -> str:
        return self._give("name", handle.card.name)

    def nvmlDeviceGetUUID(self, handle: Handle) -> str:
        return self._give("uuid of", handle.card.uuid)

    def nvmlDeviceGetCudaComputeCapability(self, handle: Handle) -> tuple[int, int]:
        return self._give("capability", handle.card.capability)

    def nvmlDeviceIsMigDeviceHandle(self, handle: Handle) -> Any:
        return self._give("is mig", pynvml.c_uint(handle.mig is not None))

    def nvmlDeviceGetMigMode(self, handle: Handle) -> list[int]:
        return self._give("mig mode", [1, 1] if handle.card.mig else NO)

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Handle) -> int:
        return self._give("mig count", 7)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Handle, index: int) -> Handle:
        there = index < len(handle.card.mig)
        return self._give("mig handle", Handle(handle.card, index) if there else "NVML_ERROR_NOT_FOUND")

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: Handle) -> Handle:
        return self._give("parent", Handle(handle.card))

    def nvmlDeviceGetGpuInstanceId(self, handle: Handle) -> int:
        assert handle.mig is not None
        return self._give("instance", 3 + handle.mig)

    def nvmlDeviceGetUtilizationRates(self, handle: Handle) -> Any:
        return SimpleNamespace(gpu=self._give("utilisation", self._whole(handle).gpu), memory=12)

    def nvmlDeviceGetMemoryInfo(self, handle: Handle, version: int | None = None) -> Any:
        if version is not None:
            self._missing(handle.card, "memory v2")
        share = 7 if handle.mig is not None else 1
        total, used = self._give("memory", handle.card.total), self._give("memory", handle.card.used)
        return SimpleNamespace(total=total // share, used=used // share)

    def nvmlDeviceGetPowerUsage(self, handle: Handle) -> int:
        return self._give("power", self._whole(handle).power)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Handle) -> int:
        return self._give("limit", self._whole(handle).limit)

    def nvmlDeviceGetTemperatureV(self, handle: Handle, sensor: int) -> int:
        self._missing(handle.card, "temperature v")
        return self._give("temperature", self._whole(handle).temperature)

    def nvmlDeviceGetTemperature(self, handle: Handle, sensor: int) -> int:
        return self._give("temperature", self._whole(handle).temperature)

    def nvmlDeviceGetClockInfo(self, handle: Handle, kind: int) -> int:
        card = self._whole(handle)
        return self._give("clock", card.sm_clock if kind == pynvml.NVML_CLOCK_SM else card.mem_clock)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Handle) -> int:
        self._missing(handle.card, "event reasons")
        return self._give("reasons", self._whole(handle).reasons)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Handle) -> int:
        return self._give("reasons", self._whole(handle).reasons)

    def _whole(self, handle: Handle) -> Card:
        assert handle.mig is None, "a MIG instance has no such value: NVML returns it for whole GPUs only"
        return handle.card

    # GPM

    def nvmlGpmQueryDeviceSupport(self, handle: Handle) -> Any:
        return SimpleNamespace(isSupportedDevice=int(self._give("gpm", self._whole(handle).gpm)))

    def nvmlGpmSampleAlloc(self) -> Any:
        buffer = pynvml.c_nvmlGpmSample_t(pynvml.struct_c_nvmlGpmSample_t())
        self.buffers.add(id(buffer))
        return buffer

    def nvmlGpmSampleFree(self, buffer: Any) -> None:
        self.buffers.remove(id(buffer))

    def nvmlGpmSampleGet(self, handle: Handle, buffer: Any) -> Any:
        assert not handle.card.mig, "a GPU in MIG mode has samples only for its instances"
        self._sampled = self._give("gpm sample", handle.card)
        return buffer

    def nvmlGpmMigSampleGet(self, handle: Handle, instance: int, buffer: Any) -> Any:
        self._whole(handle)
        self._sampled = self._give(f"gpm sample of instance {instance}", handle.card)
        return buffer

    def nvmlGpmMetricsGet(self, request: Any) -> Any:
        assert request.version == 1 and bool(request.sample1) and bool(request.sample2)
        self._give("gpm metrics", 0)
        for metric in request.metrics[: request.numMetrics]:
            value = self._sampled.counters[metric.metricId]
            metric.nvmlReturn = getattr(pynvml, value) if isinstance(value, str) else pynvml.NVML_SUCCESS
            metric.value = 0.0 if isinstance(value, str) else value
        return request
