"""NVML through the real `pynvml`: its structures and function names, against a library compiled from `nvml_stub.c`."""

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest

from amp_core.hardware.gpu_state import find
from amp_core.hardware.nvml import Nvml, NvmlError, visible
from tests.compilers import CC, needs_cc
from tests.record import fake_nvml as fakes
from tests.record.fake_nvml import CARDS, HOPPER, MIG, PASCAL, Card, FakeNvml

pytestmark = needs_cc

READINGS = ("gpu", "used", "total", "power", "limit", "temperature", "sm_clock", "mem_clock", "reasons", "gpm")


class Reading(ctypes.Structure):
    """`reading` of the stub."""

    _fields_ = [("code", ctypes.c_int), ("value", ctypes.c_longlong)]


class StubCard(ctypes.Structure):
    """`card` of the stub."""

    _fields_ = [
        *((name, ctypes.c_char * 96) for name in ("name", "uuid")),
        ("mig", (ctypes.c_char * 96) * 2),
        *((name, ctypes.c_int) for name in ("migs", "major", "minor", "old_driver")),
        *((name, Reading) for name in READINGS),
        ("counter_ids", ctypes.c_int * 4),
        ("counter_codes", ctypes.c_int * 4),
        ("counters", ctypes.c_double * 4),
    ]


def code_of(value: Any) -> int:
    """The code that NVML returns with this value of a `Card`."""
    return getattr(pynvml, value) if isinstance(value, str) and value.startswith("NVML_ERROR_") else 0


def stub_card(card: Card) -> StubCard:
    """The same card for the stub."""
    made = StubCard(card.name.encode(), card.uuid.encode(), migs=len(card.mig), old_driver=card.old_driver)
    made.major, made.minor = card.capability
    for place, uuid in enumerate(card.mig):
        made.mig[place].value = uuid.encode()
    for name in READINGS:
        value = getattr(card, name)
        setattr(made, name, Reading(code_of(value), 0 if code_of(value) else int(value)))
    for place, (number, value) in enumerate(card.counters.items()):
        made.counter_ids[place], made.counter_codes[place] = number, code_of(value)
        made.counters[place] = 0.0 if code_of(value) else value
    return made


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled stub."""
    into = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("nvml_stub.c")
    assert CC is not None, "the stub of NVML is compiled from C, and there is neither gcc nor clang"
    subprocess.run([CC, "-shared", "-fPIC", "-Wall", str(source), "-o", str(into)], check=True)
    return into


@pytest.fixture
def driver(built: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`driver(*cards, init=None)`: the driver of a machine with these cards, as `pynvml` loads it."""
    stub = ctypes.CDLL(str(built))
    assert stub.stub_card_size() == ctypes.sizeof(StubCard)
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(pynvml, "_nvmlLib_refcount", 0)
    monkeypatch.setattr(pynvml, "CDLL", lambda name: stub if name == "libnvidia-ml.so.1" else ctypes.CDLL(name))

    def use(*cards: Card, init: str | None = None) -> Any:
        array = (StubCard * max(1, len(cards)))(*map(stub_card, cards))
        stub.stub_use(ctypes.byref(array), len(cards), code_of(init))
        return stub

    return use


def read_twice(nvml: Nvml, uuid: str) -> Any:
    """What the second reading has; counters are between two."""
    with nvml:
        device = find(nvml, [uuid])
        try:
            device.read()
            return device.read()
        except NvmlError as error:
            return str(error)
        finally:
            device.close()


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_every_generation_is_read_in_nvmls_own_structures(card: Card, driver: Callable[..., Any]) -> None:
    stub = driver(card)
    uuid = card.mig[0] if card is MIG else card.uuid
    reading, expected = repr(read_twice(Nvml(), uuid)), repr(read_twice(Nvml(FakeNvml(card)), uuid))
    assert reading == expected
    assert stub.stub_buffers() == 0


def test_counters_of_tensor_cores_are_those_of_the_structure(driver: Callable[..., Any]) -> None:
    driver(HOPPER)
    values, missing = read_twice(Nvml(), HOPPER.uuid)
    assert values["tensor_active_frac"] == pytest.approx(0.41) and values["dram_active_frac"] == pytest.approx(0.33)
    assert values["temperature_c"] == 61 and values["memory_used_bytes"] == 30 * 2**30 and not missing


def test_what_may_not_be_read_is_missing_with_the_reason(driver: Callable[..., Any]) -> None:
    driver(fakes.FORBIDDEN)
    values, missing = read_twice(Nvml(), fakes.FORBIDDEN.uuid)
    assert (
        "tensor_active_frac" not in values and missing["tensor_active_frac"] == "this user lacks permission to read it"
    )


def test_a_gpu_that_is_lost_in_the_middle_and_comes_back(driver: Callable[..., Any]) -> None:
    stub = driver(HOPPER)
    with Nvml() as nvml:
        device = find(nvml, [HOPPER.uuid])
        device.read()
        stub.stub_lose(pynvml.NVML_ERROR_GPU_IS_LOST)
        with pytest.raises(NvmlError, match="the GPU is lost"):
            device.read()
        stub.stub_lose(0)
        assert device.read()[0]["power_w"] == pytest.approx(412.345)
        device.close()
    assert stub.stub_buffers() == 0


def test_gpus_of_a_machine_are_listed_with_what_is_visible_of_them(driver: Callable[..., Any]) -> None:
    driver(PASCAL, HOPPER)
    with Nvml() as nvml:
        gpus = nvml.gpus()
        assert (nvml.driver(), nvml.cuda()) == ("580.65.06", "13.0")
    assert [(g.name, g.capability, g.memory_bytes) for g in visible(gpus, "1")] == [("NVIDIA H200", (9, 0), 80 * 2**30)]
    assert find_by_address(1) == "NVIDIA H200"


def find_by_address(bus: int) -> str:
    with Nvml() as nvml:
        device = find(nvml, ["GPU-unknown"], f"00000000:{bus:02x}:00.0")
        return str(nvml.query("nvmlDeviceGetName", device._own))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("NVML_ERROR_DRIVER_NOT_LOADED", "the NVIDIA driver is not loaded"),
        ("NVML_ERROR_LIB_RM_VERSION_MISMATCH", "restart the machine"),
        ("NVML_ERROR_NO_PERMISSION", "this user lacks permission to read it"),
    ],
)
def test_a_driver_that_does_not_start_says_why(error: str, message: str, driver: Callable[..., Any]) -> None:
    driver(HOPPER, init=error)
    with pytest.raises(NvmlError, match=message), Nvml():
        pass
