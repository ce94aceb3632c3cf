"""The registry of backends, the defaults of the interface, and their users."""

import pytest
import torch

from amp_core.hardware.autocast_ops import LISTS
from amp_core.hardware.device_types import ACCELERATORS, is_accelerator
from amp_core.record import backends
from amp_core.record.backends import BACKENDS, Backend, backend_named, backend_of
from amp_core.schema import RunError
from amp_core.settings.training import TrainConfig
from amp_core.train.engine.training import choose_device


class TwoDevices(Backend):
    """A type with two devices; the second is the current one."""

    type = "hpu"
    selected_index: int | None = None
    count = staticmethod(lambda: 2)
    current = staticmethod(lambda: 1)

    @staticmethod
    def select(index: int) -> None:
        TwoDevices.selected_index = index


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> type[TwoDevices]:
    monkeypatch.setattr(backends, "BACKENDS", {"hpu": TwoDevices} | BACKENDS)
    return TwoDevices


def test_every_device_choice_of_a_training_has_a_backend() -> None:
    assert set(BACKENDS) == set(LISTS) == {"cpu", *ACCELERATORS}
    assert all(backend.type == kind for kind, backend in BACKENDS.items())
    for kind in ACCELERATORS:
        assert TrainConfig(workload="digits-cnn", device=f"{kind}:1").device == f"{kind}:1"


def test_each_device_has_a_single_backend_object() -> None:
    cpu = torch.device("cpu")
    assert backend_of(cpu) is backend_of(torch.device("cpu")) and isinstance(backend_of(cpu), BACKENDS["cpu"])
    assert backend_of(torch.device("cuda:1")) is not backend_of(torch.device("cuda:0"))
    assert type(backend_of(torch.device("mps"))) is Backend


def test_a_device_of_another_type_is_chosen_like_a_gpu(two_devices: type[TwoDevices]) -> None:
    assert choose_device("auto") == choose_device("hpu") == torch.device("hpu:1") and two_devices.selected_index == 1
    assert choose_device("hpu:0") == torch.device("hpu:0") and two_devices.selected_index == 0
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(RunError, match=r"device='hpu:2' is not available; this machine has hpu:0, hpu:1"):
        choose_device("hpu:2")
    assert backend_named("hpu:1") is two_devices


def test_a_type_without_devices_is_refused_with_the_reason(
    two_devices: type[TwoDevices], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(two_devices, "count", lambda: 0)
    with pytest.raises(RunError, match="device='hpu' is not available: torch finds no hpu device; choose cpu or auto"):
        choose_device("hpu")


def test_a_memory_limit_that_cannot_be_enforced_is_refused() -> None:
    with pytest.raises(RunError, match="limit_bytes=5 cannot be enforced on hpu:0"):
        TwoDevices(torch.device("hpu:0")).limit_memory(5)


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cuda:0", True), ("hpu", True), ("cpu", False), ("cpu:0", False), ("", False), (None, False), (3, False)],
)
def test_recorded_devices_are_accelerators_or_the_cpu(device: object, expected: bool) -> None:
    assert is_accelerator(device) is expected
