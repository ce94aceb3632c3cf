"""The CUDA backend on a machine without CUDA: fakes replace functions of torch."""

from types import SimpleNamespace

import pytest
import torch

from amp_core.hardware.gpus import gpu_of
from amp_core.record import environment as recorded
from amp_core.record.backends.base import Allocated
from amp_core.record.backends.cuda import Cuda
from amp_core.record.stats.host_transfer import HostTransfer, _words
from amp_core.train import environment as described


@pytest.fixture
def machine(monkeypatch):
    """`machine(name, major, minor, hip=None)` makes torch report a single GPU with these properties."""

    def make(name, major, minor, hip=None):
        properties = SimpleNamespace(name=name, major=major, minor=minor, total_memory=2**36, multi_processor_count=228)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        monkeypatch.setattr(torch.version, "hip", hip)

    return make


def test_a_cudnn_that_torch_refuses_is_null(machine, monkeypatch):
    """As on a V100 with cuDNN 9.11 or later: the rest of the environment is described all the same."""

    def refuses():
        raise RuntimeError("cuDNN version 92000 is not compatible with devices with SM < 7.5.")

    machine("Tesla V100-SXM2-16GB", 7, 0)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", refuses)
    for environment in (recorded.environment(), described.environment()):
        assert environment["cudnn"] is None and environment["gpus"][0]["name"] == "Tesla V100-SXM2-16GB"


@pytest.mark.parametrize("version", ["2.13.0+cu130", "2.13.0+cpu"])
def test_env_and_a_runs_head_name_the_same_build_of_torch(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    assert described.environment()["packages"]["torch"] == recorded.environment()["torch"] == version


def test_an_amd_gpu_has_no_compute_capability_in_a_runs_head_and_in_env(machine):
    machine("Instinct MI300X", 9, 4, hip="6.2.41133")
    (gpu,) = recorded.environment()["gpus"]
    assert gpu == {
        "name": "AMD Instinct MI300X",
        "capability": None,
        "memory_bytes": 2**36,
        "multiprocessors": 228,
    }
    assert gpu_of(gpu["name"], gpu["capability"]).has_tensor_cores is None
    (shown,) = described.environment()["gpus"]
    assert (shown["name"], shown["capability"], shown["device"]) == ("AMD Instinct MI300X", None, "cuda:0")
    assert recorded.environment()["hip"] == "6.2.41133"


def test_an_nvidia_gpu_has_its_compute_capability(machine):
    machine("NVIDIA H100 80GB HBM3", 9, 0)
    (gpu,) = recorded.environment()["gpus"]
    assert (gpu["name"], gpu["capability"]) == ("NVIDIA H100 80GB HBM3", "9.0")
    assert "hip" not in recorded.environment()


def test_numbers_are_copied_to_pinned_memory_and_read_when_the_event_has_passed(monkeypatch):
    passed, order = [], []
    empty = torch.empty

    class Event:
        def record(self, stream):
            order.append(f"recorded on {stream}")

        def query(self):
            return bool(passed)

        def synchronize(self):
            passed.append(True)

    def pinned(*shape, pin_memory=False, **options):
        order.append("pinned" if pin_memory else "plain")
        return empty(*shape, **options)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    monkeypatch.setattr(torch, "empty", pinned)
    transfer = HostTransfer()
    parts = [torch.tensor([1.0, 2.0], dtype=torch.float16), torch.tensor(3)]
    transfer._parts = {name: _words(part) for name, part in zip("ab", parts, strict=True)}
    monkeypatch.setattr("amp_core.record.stats.host_transfer.backend_of", lambda device: Cuda(torch.device("cuda:0")))
    transfer.send()
    assert order == ["pinned", "recorded on the stream of cuda:0"] and not transfer.ready()
    assert transfer.ready(wait=True)
    assert transfer.joined(["a", "b"]).tolist() == [1, 2, 3] and transfer.value("b") == 3


def test_a_memory_limit_is_set_as_a_fraction_of_the_devices_memory(machine, monkeypatch):
    machine("NVIDIA L4", 8, 9)
    kept = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: kept.append(share))
    gpu = Cuda(torch.device("cuda:0"))
    gpu.limit_memory(2**35)
    gpu.limit_memory(2**40)
    assert kept == [0.5, 1.0]


def test_memory_that_an_allocator_does_not_count_is_null(monkeypatch):
    def refuse(device):
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.")

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", refuse)
    gpu = Cuda(torch.device("cuda:0"))
    assert gpu.memory_bytes() == (None, None) and gpu.read_allocator() == Allocated()


@pytest.mark.parametrize(
    ("initialized", "reserved", "used"), [(False, 1, False), (True, 0, False), (True, 2**21, True)]
)
def test_a_gpu_is_in_use_once_torch_has_memory_of_it(monkeypatch, initialized, reserved, used):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: reserved * index)
    assert Cuda.in_use() is used
