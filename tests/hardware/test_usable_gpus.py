"""Which GPUs a training would see: by the driver, or by torch where that does not answer."""

import json
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from amp_core.hardware import nvml
from amp_core.hardware import usable_gpus as usable
from amp_core.hardware.nvml import GpuFacts, Nvml, NvmlError
from amp_core.jobs.backends import local
from amp_core.settings.training import TrainConfig
from tests.record.fake_nvml import HOPPER, FakeNvml

MI300X = {"name": "AMD Instinct MI300X", "capability": None, "memory_bytes": 2**37, "usable": True}
UNUSABLE = {"name": "NVIDIA L4", "capability": "8.9", "memory_bytes": 2**34, "usable": False}


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    usable.torch_gpus.cache_clear()
    yield
    usable.torch_gpus.cache_clear()


def machine(monkeypatch: pytest.MonkeyPatch, *gpus: dict[str, object], version: str = "2.13.0+rocm7.0") -> list[int]:
    """A machine without NVML on which torch finds these; returns a list that grows when torch is asked."""
    asked: list[int] = []

    def run(command: list[str], **options: object) -> SimpleNamespace:
        assert command[1:] == ["-m", "amp_core", "env", "--json"]
        asked.append(1)
        return SimpleNamespace(stdout=json.dumps({"gpus": gpus}))

    monkeypatch.setattr(usable, "metadata", SimpleNamespace(version=lambda package: version))
    monkeypatch.setattr(usable, "subprocess", SimpleNamespace(run=run, SubprocessError=subprocess.SubprocessError))
    monkeypatch.setattr(nvml, "Nvml", lambda: Nvml(FakeNvml(init="NVML_ERROR_LIBRARY_NOT_FOUND")))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return asked


def test_torch_is_asked_once_where_the_driver_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = machine(monkeypatch, MI300X, UNUSABLE)
    assert usable.usable_gpus() == usable.usable_gpus() == [GpuFacts("AMD Instinct MI300X", None, 2**37, None)]
    assert asked == [1]


@pytest.mark.parametrize("version", ["2.13.0+cu130", "2.13.0+cpu"])
def test_where_neither_knows_a_gpu_the_drivers_reason_is_given(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = machine(monkeypatch, version=version)
    with pytest.raises(NvmlError, match="no NVIDIA driver is installed"):
        usable.usable_gpus()
    assert len(asked) == ("+cpu" not in version)


def test_the_driver_is_enough_where_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = machine(monkeypatch, MI300X)
    monkeypatch.setattr(nvml, "Nvml", lambda: Nvml(FakeNvml(HOPPER)))
    assert [gpu.name for gpu in usable.usable_gpus()] == ["NVIDIA H200"]
    assert asked == []


def test_a_job_of_the_device_auto_waits_for_the_gpu_that_torch_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, MI300X)
    monkeypatch.setattr(local, "metadata", SimpleNamespace(version=lambda package: "2.13.0+rocm7.0"))
    assert local.device_of(TrainConfig(device="auto")) == "cuda:0"
