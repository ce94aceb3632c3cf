"""The device sampler against GPUs of every generation: what they tell is recorded, what they do not is null."""

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
    """A closed run in which the sampler wrote at least so many rows; `between` is called while it does."""
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
    assert nvml.open == 0 and not nvml.buffers  # everything is given back
    return load_run(tmp_path / "run")


def reasons(run):
    events = run.events[run.events.name == "not recorded"]
    return events.detail.tolist()


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_every_generation_is_sampled_as_far_as_it_is_supported(tmp_path, card):
    run = sampled(tmp_path, FakeNvml(card))
    run.validate(full=True)
    assert len(reasons(run)) <= 1
    said = "".join(reasons(run))
    rows = run.table("device").to_pylist()
    assert [row["index"] for row in rows] == [0] * len(rows)
    for column in (*VALUES, *CLOCKS, *GPM_METRICS):
        value = rows[-1][column]
        assert (value is None) == (column in said), column  # null, and then there is a reason
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


def test_a_counter_that_fails_or_is_no_number_is_null_and_one_above_all_is_all(tmp_path):
    run = sampled(tmp_path, FakeNvml(fakes.BLACKWELL))
    row = run.table("device").to_pylist()[-1]
    assert row["sm_active_frac"] == 1.0 and row["tensor_active_frac"] == pytest.approx(0.71)
    assert row["hmma_active_frac"] is None and row["dram_active_frac"] is None
    (said,) = reasons(run)
    assert "hmma_active_frac: this GPU does not report it" in said
    assert "dram_active_frac: the driver returned a non-finite number" in said


def test_before_hopper_the_counters_are_null_and_the_rest_is_there(tmp_path):
    run = sampled(tmp_path, FakeNvml(fakes.AMPERE))
    assert run.device.tensor_active_frac.isna().all() and run.device.power_w.notna().all()
    (said,) = reasons(run)
    assert "need an NVIDIA GPU of the Hopper generation or newer" in said
    assert run.device.throttle.tolist()[0] == "power cap"


def test_what_may_not_be_read_says_so(tmp_path):
    run = sampled(tmp_path, FakeNvml(fakes.FORBIDDEN))
    assert run.device[list(GPM_METRICS)].isna().all().all()
    (said,) = reasons(run)
    assert said == f"{', '.join(GPM_METRICS)}: this user may not read it"


def test_a_mig_instance_has_counters_of_its_own_and_the_gpus_power(tmp_path):
    nvml = FakeNvml(fakes.MIG)
    run = sampled(tmp_path, nvml, uuids=["MIG-two"])
    row = run.table("device").to_pylist()[-1]
    assert "gpm sample of instance 4" in nvml.calls
    assert row["tensor_active_frac"] == pytest.approx(0.41) and row["power_w"] == pytest.approx(412.345)
    assert row["memory_total_bytes"] == 80 * 2**30 // 7
    assert reasons(run) == ["gpu_util_frac: this GPU does not report it"]


def test_of_several_mig_instances_none_is_guessed_and_a_single_one_is_meant(tmp_path):
    run = sampled(tmp_path / "several", FakeNvml(fakes.MIG))
    assert run.device.memory_used_bytes.isna().all() and run.device.tensor_active_frac.isna().all()
    assert "name one in CUDA_VISIBLE_DEVICES" in reasons(run)[0]
    run = sampled(tmp_path / "one", FakeNvml(fakes.ONE_MIG))
    assert run.device.tensor_active_frac.iloc[-1] == pytest.approx(0.41)


def test_the_device_is_identified_by_uuid_then_by_pci_address_never_by_number(tmp_path):
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
    ("nvml", "said"),
    [
        (FakeNvml(init="NVML_ERROR_LIBRARY_NOT_FOUND"), "device samples: there is no NVIDIA driver here"),
        (FakeNvml(init="NVML_ERROR_LIB_RM_VERSION_MISMATCH"), "restart the machine"),
        (FakeNvml(), "device samples: the driver does not know it"),
    ],
)
def test_without_an_answer_there_is_no_row_and_one_reason(tmp_path, nvml, said):
    run = sampled(tmp_path, nvml, uuids=["GPU-x"])
    assert len(run.device) == 0
    assert len(reasons(run)) == 1 and said in reasons(run)[0]


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
    seen = []

    def between(rows):
        if rows == 2 and not seen:
            seen.append("lost")
            nvml.lose()
        elif seen == ["lost"] and nvml.calls.count("uuid") >= 4:  # it was asked for again, in vain
            seen.append("back")
            nvml.find_again()

    run = sampled(tmp_path, nvml, rows=5, between=between, retry_s=0.05)
    assert seen == ["lost", "back"] and len(run.device) >= 5
    (said,) = reasons(run)
    assert "the GPU is lost" in said and "asked again" in said
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
def test_an_interval_below_what_the_counters_need_is_refused(tmp_path, interval_s):
    with (
        RunWriter(tmp_path / "run") as writer,
        pytest.raises(RunError, match=r"interval_s=.* of at least 0\.2"),
    ):
        DeviceSampler(writer, GPU, interval_s)


def test_a_forked_child_has_no_sampler_and_its_end_is_not_the_runs(tmp_path):
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


def test_a_driver_that_hangs_does_not_hold_the_end_of_a_run(tmp_path, monkeypatch):
    nvml = FakeNvml(fakes.VOLTA)
    asked, answers = threading.Event(), threading.Event()

    def hangs(handle):
        asked.set()
        answers.wait(300)
        return 1

    monkeypatch.setattr(nvml, "nvmlDeviceGetPowerUsage", hangs, raising=False)
    with RunWriter(tmp_path / "run") as writer:
        sampler = DeviceSampler(writer, GPU, 0.2, source=NvmlSource([fakes.VOLTA.uuid], library=nvml))
        thread = sampler._thread
        assert asked.wait(300)
        sampler.close()
        assert thread.is_alive()  # it was not waited for
    answers.set()
    thread.join(300)
    assert not thread.is_alive()


def test_the_reason_for_lowered_clocks_is_given_in_words():
    assert throttle_words(0) == "none"
    assert throttle_words(0x4 | 0x40) == "power cap, hardware thermal slowdown"
    assert throttle_words(0x1 | 0x8000) == "idle, reason 0x8000"


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        (None, ["P100", "H200", "L4"]),
        ("1", ["H200"]),
        ("2, 0", ["L4", "P100"]),
        ("GPU-h2", ["H200"]),
        ("1,7,0", ["H200"]),  # what names no GPU ends the list, as in CUDA
        ("", []),
        ("-1", []),
        ("none", []),
        ("MIG-aa", ["instance"]),
    ],
)
def test_what_cuda_visible_devices_leaves_is_known(asked, names):
    with Nvml(FakeNvml(fakes.PASCAL, fakes.HOPPER, fakes.ADA)) as nvml:
        assert [gpu.name.split()[-1] for gpu in visible(nvml.gpus(), asked)] == names


def test_of_a_mig_instance_the_generation_is_known_where_all_gpus_are_alike():
    with Nvml(FakeNvml(fakes.HOPPER, fakes.HOPPER)) as nvml:
        (found,) = visible(nvml.gpus(), "MIG-aa,MIG-bb")
    assert (found.name, found.capability, found.memory_bytes) == ("NVIDIA H200, MIG instance", (9, 0), None)


def test_every_function_asked_for_exists_in_the_package():
    """The fake replaces functions by name, so a name that NVML never had would pass with it."""
    import pynvml

    replaced = [name for name in vars(FakeNvml) if name.startswith("nvml")]
    newer = {"nvmlDeviceGetTemperatureV"}  # not in the oldest package that is allowed; the older one is asked there
    assert len(replaced) > 25 and {name for name in replaced if not hasattr(pynvml, name)} <= newer
    with Nvml(FakeNvml(fakes.HOPPER)) as nvml:
        assert nvml.gpus()[0].capability == (9, 0) and nvml.driver() == "580.65.06"
        with pytest.raises(NvmlError):
            find(nvml, [])
