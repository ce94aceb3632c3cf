"""The device sampler with GPUs of each generation: provided values are recorded, missing ones are null."""

import math
import os
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from amp_core import RunError, load_run
from amp_core.hardware.gpu_state import GPM_METRICS, find, throttle_words
from amp_core.hardware.nvml import Nvml, NvmlError, visible
from amp_core.record.backends import cuda
from amp_core.record.backends.cuda import NvmlSource, addresses
from amp_core.record.observers.device import DeviceSampler
from amp_core.store.writer import RunWriter
from tests.record import fake_nvml as fakes
from tests.record.fake_nvml import CARDS, FakeNvml

GPU = torch.device("cuda:0")
VALUES = ("gpu_util_frac", "memory_used_bytes", "memory_total_bytes", "power_w", "power_limit_w", "temperature_c")
CLOCKS = ("sm_clock_mhz", "mem_clock_mhz", "throttle")


def sampled(tmp_path, nvml, *, rows=3, uuids=None, pci=None, between=lambda rows: None, device=GPU, **options):
    """A closed run with at least `rows` rows of the sampler; `between` is called meanwhile."""
    writer = RunWriter(tmp_path / "run")
    uuids = uuids if uuids is not None else [nvml.cards[0].uuid]
    sampler = DeviceSampler(writer, device, 0.2, source=NvmlSource(uuids, pci, nvml), **options)
    run = load_run(tmp_path / "run")
    until = time.monotonic() + 300
    while time.monotonic() < until and sampler._thread is not None and sampler._thread.is_alive():
        run.refresh()
        have = run.table("device").num_rows
        between(have)
        if have >= rows:
            break
        time.sleep(0.02)
    sampler.close()
    writer.close()
    assert nvml.open == 0 and not nvml.buffers  # all resources are released
    return load_run(tmp_path / "run")


def reasons(run):
    events = run.events[run.events.name == "not recorded"]
    return events.detail.tolist()


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_every_generation_is_sampled_as_far_as_it_is_supported(tmp_path, card):
    run = sampled(tmp_path, FakeNvml(card))
    run.validate(full=True)
    assert len(reasons(run)) <= 1
    reason = "".join(reasons(run))
    rows = run.table("device").to_pylist()
    assert [row["index"] for row in rows] == [0] * len(rows)
    for column in (*VALUES, *CLOCKS, *GPM_METRICS):
        value = rows[-1][column]
        assert (value is None) == (column in reason), column  # a null column has a reason
    for row in rows:
        assert all(not isinstance(v, float) or math.isfinite(v) for v in row.values())


def test_hopper_has_all_values_and_counters_begin_with_the_second_sample(tmp_path):
    run = sampled(tmp_path, FakeNvml(fakes.HOPPER))
    assert reasons(run) == []
    first, second = run.table("device").to_pylist()[:2]
    assert first["sm_active_frac"] is None and first["power_w"] == pytest.approx(412.345)
    assert second["tensor_active_frac"] == pytest.approx(0.41)
    assert (second["sm_active_frac"], second["hmma_active_frac"]) == pytest.approx((0.88, 0.405))
    assert second["dram_active_frac"] == pytest.approx(0.33)
    assert (second["gpu_util_frac"], second["temperature_c"], second["power_limit_w"]) == (0.93, 61.0, 700.0)
    assert (second["sm_clock_mhz"], second["mem_clock_mhz"], second["throttle"]) == (1980.0, 2619.0, "none")
    assert (second["memory_used_bytes"], second["memory_total_bytes"]) == (30 * 2**30, 80 * 2**30)
    assert second["time_s"] - first["time_s"] >= 0.19


def test_a_counter_that_fails_or_is_nan_is_null_and_one_above_100_percent_is_1(tmp_path):
    run = sampled(tmp_path, FakeNvml(fakes.BLACKWELL))
    row = run.table("device").to_pylist()[-1]
    assert row["sm_active_frac"] == 1.0 and row["tensor_active_frac"] == pytest.approx(0.71)
    assert row["hmma_active_frac"] is None and row["dram_active_frac"] is None
    (reason,) = reasons(run)
    assert "hmma_active_frac: this GPU does not report it" in reason
    assert "dram_active_frac: the driver returned a non-finite number" in reason


def test_before_hopper_the_counters_are_null_and_the_rest_is_recorded(tmp_path):
    run = sampled(tmp_path, FakeNvml(fakes.AMPERE))
    assert run.device.tensor_active_frac.isna().all() and run.device.power_w.notna().all()
    (reason,) = reasons(run)
    assert "need an NVIDIA GPU of the Hopper generation or newer" in reason
    assert run.device.throttle.tolist()[0] == "power cap"


def test_a_value_without_permission_is_null_with_a_reason(tmp_path):
    run = sampled(tmp_path, FakeNvml(fakes.FORBIDDEN))
    assert run.device[list(GPM_METRICS)].isna().all().all()
    (reason,) = reasons(run)
    assert reason == f"{', '.join(GPM_METRICS)}: this user lacks permission to read it"


def test_a_mig_instance_has_its_own_counters_and_the_power_of_the_gpu(tmp_path):
    nvml = FakeNvml(fakes.MIG)
    run = sampled(tmp_path, nvml, uuids=["MIG-two"])
    row = run.table("device").to_pylist()[-1]
    assert "gpm sample of instance 4" in nvml.calls
    assert row["tensor_active_frac"] == pytest.approx(0.41) and row["power_w"] == pytest.approx(412.345)
    assert row["memory_total_bytes"] == 80 * 2**30 // 7
    assert reasons(run) == ["gpu_util_frac: this GPU does not report it"]


def test_a_single_mig_instance_is_sampled_and_of_several_none(tmp_path):
    run = sampled(tmp_path / "several", FakeNvml(fakes.MIG))
    assert run.device.memory_used_bytes.isna().all() and run.device.tensor_active_frac.isna().all()
    assert "name one in CUDA_VISIBLE_DEVICES" in reasons(run)[0]
    run = sampled(tmp_path / "one", FakeNvml(fakes.ONE_MIG))
    assert run.device.tensor_active_frac.iloc[-1] == pytest.approx(0.41)


def test_the_device_is_identified_by_uuid_or_pci_address_and_never_by_number(tmp_path):
    nvml = FakeNvml(fakes.PASCAL, fakes.HOPPER)
    run = sampled(tmp_path / "uuid", nvml, uuids=["MIG-unknown", fakes.HOPPER.uuid])
    assert run.device.power_limit_w.iloc[0] == 700.0 and "handle" not in nvml.calls
    run = sampled(tmp_path / "pci", nvml, uuids=["GPU-unknown"], pci="00000000:01:00.0")
    assert run.device.tensor_active_frac.iloc[-1] == pytest.approx(0.41)
    run = sampled(tmp_path / "none", nvml, uuids=["GPU-unknown"], device=torch.device("cuda:1"))
    assert len(run.device) == 0 and reasons(run) == ["device samples: the driver does not know it"]


def test_torch_provides_uuid_and_pci_address(monkeypatch):
    properties = SimpleNamespace(uuid="1f0c-22", pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert addresses(GPU) == (["GPU-1f0c-22", "MIG-1f0c-22"], "00000000:1b:00.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-aa")
    assert addresses(GPU)[0][0] == "MIG-aa"
    del properties.pci_bus_id
    assert addresses(GPU)[1] is None


@pytest.mark.parametrize(
    ("nvml", "reason"),
    [
        (FakeNvml(init="NVML_ERROR_LIBRARY_NOT_FOUND"), "device samples: no NVIDIA driver is installed"),
        (FakeNvml(init="NVML_ERROR_LIB_RM_VERSION_MISMATCH"), "restart the machine"),
        (FakeNvml(), "device samples: the driver does not know it"),
    ],
)
def test_without_an_answer_there_is_no_row_and_a_single_reason(tmp_path, nvml, reason):
    run = sampled(tmp_path, nvml, uuids=["GPU-x"])
    assert len(run.device) == 0
    assert len(reasons(run)) == 1 and reason in reasons(run)[0]


def test_a_missing_package_is_a_reason(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(cuda, "addresses", lambda device: (["GPU-x"], None))
    with pytest.raises(NvmlError, match="nvidia-ml-py is not installed"):
        Nvml()
    with RunWriter(tmp_path / "run") as writer:
        sampler = DeviceSampler(writer, GPU)
        assert sampler._thread is None
    assert reasons(load_run(tmp_path / "run")) == ["device samples: the package nvidia-ml-py is not installed"]


def test_a_lost_device_is_reported_once_and_sampled_again(tmp_path):
    nvml = FakeNvml(fakes.HOPPER)
    events = []

    def between(rows):
        if rows == 2 and not events:
            events.append("lost")
            nvml.lose()
        elif events == ["lost"] and nvml.calls.count("uuid") >= 4:  # NVML was opened again, in vain
            events.append("back")
            nvml.find_again()

    run = sampled(tmp_path, nvml, rows=5, between=between, retry_s=0.05)
    assert events == ["lost", "back"] and len(run.device) >= 5
    (reason,) = reasons(run)
    assert "the GPU is lost" in reason and "asked again" in reason
    back = run.events[run.events.name == "device samples"]
    assert back.kind.tolist() == ["phase change"] and back.detail.iloc[0].startswith("again, after ")


def test_on_a_cpu_nothing_is_sampled_or_reported(tmp_path):
    with RunWriter(tmp_path / "run") as writer:
        sampler = DeviceSampler(writer, torch.device("cpu"))
        assert sampler._thread is None
        sampler.close()
    run = load_run(tmp_path / "run")
    assert len(run.device) == 0 and reasons(run) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a CUDA device that must not be there")
def test_cuda_that_torch_cannot_use_is_a_reason(tmp_path):
    with RunWriter(tmp_path / "run") as writer:
        DeviceSampler(writer, GPU).close()
    assert len(reasons(load_run(tmp_path / "run"))) == 1


@pytest.mark.parametrize("interval_s", [0.1, 0, -1, math.nan, "1", True, None])
def test_an_interval_too_short_for_the_counters_is_refused(tmp_path, interval_s):
    with (
        RunWriter(tmp_path / "run") as writer,
        pytest.raises(RunError, match=r"interval_s=.* of at least 0\.2"),
    ):
        DeviceSampler(writer, GPU, interval_s)


def test_a_forked_child_has_no_sampler_and_does_not_end_the_run(tmp_path):
    nvml = FakeNvml(fakes.VOLTA)
    writer = RunWriter(tmp_path / "run")
    sampler = DeviceSampler(writer, GPU, 0.2, source=NvmlSource([fakes.VOLTA.uuid], library=nvml))
    child = os.fork()
    if child == 0:
        sampler.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert sampler._thread is not None and sampler._thread.is_alive()
    sampler.close()
    writer.close()
    assert len(load_run(tmp_path / "run").device) >= 1


def test_a_driver_that_hangs_does_not_delay_the_end_of_a_run(tmp_path, monkeypatch):
    nvml = FakeNvml(fakes.VOLTA)
    queried, answers = threading.Event(), threading.Event()

    def hangs(handle):
        queried.set()
        answers.wait(300)
        return 1

    monkeypatch.setattr(nvml, "nvmlDeviceGetPowerUsage", hangs, raising=False)
    with RunWriter(tmp_path / "run") as writer:
        sampler = DeviceSampler(writer, GPU, 0.2, source=NvmlSource([fakes.VOLTA.uuid], library=nvml))
        thread = sampler._thread
        assert queried.wait(300)
        sampler.close()
        assert thread.is_alive()  # the end did not wait for it
    answers.set()
    thread.join(300)
    assert not thread.is_alive()


def test_the_reason_for_lowered_clocks_is_given_in_words():
    assert throttle_words(0) == "none"
    assert throttle_words(0x4 | 0x40) == "power cap, hardware thermal slowdown"
    assert throttle_words(0x1 | 0x8000) == "idle, reason 0x8000"


@pytest.mark.parametrize(
    ("queried", "names"),
    [
        (None, ["P100", "H200", "L4"]),
        ("1", ["H200"]),
        ("2, 0", ["L4", "P100"]),
        ("GPU-h2", ["H200"]),
        ("1,7,0", ["H200"]),  # an entry that names no GPU ends the list, as in CUDA
        ("", []),
        ("-1", []),
        ("none", []),
        ("MIG-aa", ["instance"]),
    ],
)
def test_cuda_visible_devices_selects_gpus_as_in_cuda(queried, names):
    with Nvml(FakeNvml(fakes.PASCAL, fakes.HOPPER, fakes.ADA)) as nvml:
        assert [gpu.name.split()[-1] for gpu in visible(nvml.gpus(), queried)] == names


def test_the_generation_of_a_mig_instance_is_known_if_all_gpus_are_the_same():
    with Nvml(FakeNvml(fakes.HOPPER, fakes.HOPPER)) as nvml:
        (gpu,) = visible(nvml.gpus(), "MIG-aa,MIG-bb")
    assert (gpu.name, gpu.capability, gpu.memory_bytes) == ("NVIDIA H200, MIG instance", (9, 0), None)


def test_every_nvml_function_that_is_called_exists_in_the_package():
    """The fake replaces functions by name, so without this test it could replace one that NVML does not have."""
    import pynvml

    replaced = [name for name in vars(FakeNvml) if name.startswith("nvml")]
    newer = {"nvmlDeviceGetTemperatureV"}  # missing in the oldest supported package, where the older function is called
    assert len(replaced) > 25 and {name for name in replaced if not hasattr(pynvml, name)} <= newer
    with Nvml(FakeNvml(fakes.HOPPER)) as nvml:
        assert nvml.gpus()[0].capability == (9, 0) and nvml.driver() == "580.65.06"
        with pytest.raises(NvmlError):
            find(nvml, [])
