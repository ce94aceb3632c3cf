"""Device gauges on the live page, the chart of the device on a finished run, and the card of the machine."""

import pytest

from amp_core.hardware import nvml as nvml_module
from amp_core.hardware import usable_gpus
from amp_core.hardware.nvml import Nvml
from amp_core.store.writer import RunWriter
from pages.parts.hardware import abilities
from pages.parts.start import devices
from tests.pages.conftest import metric, titles, words
from tests.record import fake_nvml as fakes
from tests.record.fake_nvml import FakeNvml
from tests.synthetic import live, write

START = "pages/start_run.py"


def test_live_gauges_show_the_newest_sample(home, open_app):
    with live(home.runs / "a", "bf16") as run:
        run.advance(3)
        record = {"tensor_active_frac": [0.41], "sm_active_frac": [0.9], "power_w": [412.0], "throttle": ["power cap"]}
        run.writer.append("device", {"time_s": [99.0], "power_limit_w": [700.0]} | record)
        app = open_app(run="run/a")
        assert metric(app, "GPU busy").value == "90.0 %"
        assert metric(app, "Tensor cores").value == "41.0 %"
        assert metric(app, "Tensor cores").delta == "SMs 90.0 %"
        assert metric(app, "Power").value == "412 W" and metric(app, "Power").delta == "of 700 W"
        assert metric(app, "Device memory").delta == "of 80.0 GiB"
        assert metric(app, "Temperature").value == "61.0 °C"
        assert metric(app, "Temperature").delta == "power cap"


def test_a_counter_that_a_gpu_lacks_is_not_zero(home, open_app):
    with live(home.runs / "a", "bf16") as run:
        run.advance(3)
        app = open_app(run="run/a")
        assert metric(app, "Tensor cores").value == "–"
        assert metric(app, "Tensor cores").delta == "not counted"


@pytest.mark.parametrize(
    ("config", "detail", "expected"),
    [
        ({"device": "cpu"}, None, "No device gauges: they need an NVIDIA GPU"),
        ({"device": "cuda:0"}, None, "No device gauges yet: the GPU has not been sampled."),
        (
            {"device": "cuda:0"},
            "device samples: no NVIDIA driver is installed",
            "No device gauges: no NVIDIA",
        ),
    ],
)
def test_without_samples_there_is_one_sentence(home, open_app, config, detail, expected):
    writer = RunWriter(home.runs / "a", config=config)
    writer.append("steps", {"step": [0, 1], "loss": [2.0, 1.9]})
    if detail:
        writer.event("warning", "not recorded", detail)
    app = open_app(run="run/a")
    writer.close()
    assert expected in words(app) and not [c for c in app.metric if c.label == "GPU busy"]


def test_a_finished_run_shows_its_device_samples_as_a_chart(home, open_app):
    write(home.runs / "a", "bf16")
    write(home.runs / "b", "healthy")
    assert "Share of time on the device" in titles(open_app(run="run/a"))
    assert "Share of time on the device" not in titles(open_app(run="run/b"))


@pytest.fixture
def machine(monkeypatch):
    """Make this machine appear to have the given GPUs, or no NVIDIA GPU."""

    def make(*cards, torch_version="2.13.0+cu130"):
        for remembered in (abilities._gpus, devices.available, devices.memory_bytes):
            remembered.clear()
        nvml = FakeNvml(*cards, init=None if cards else "NVML_ERROR_LIBRARY_NOT_FOUND")
        monkeypatch.setattr(nvml_module, "Nvml", lambda: Nvml(nvml))
        monkeypatch.setattr(usable_gpus, "torch_gpus", tuple)  # torch finds none
        monkeypatch.setattr(devices.metadata, "version", lambda package: torch_version)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(abilities, "cpu_flags", lambda: frozenset({"avx2"}))

    yield make
    for remembered in (abilities._gpus, devices.available, devices.memory_bytes):
        remembered.clear()


def test_the_card_says_what_this_machine_can_do(home, open_app, machine):
    machine(fakes.HOPPER, fakes.HOPPER)
    page_text = words(open_app(START))
    assert "2 × NVIDIA H200: Tensor cores for FP16, BF16, TF32 and FP8" in page_text.replace("**", "")
    assert "Try **BF16 AMP** first." in page_text


def test_the_card_says_that_there_are_no_tensor_cores(home, open_app, machine):
    machine(fakes.GTX16)
    page_text = words(open_app(START))
    assert "No tensor cores, despite compute capability 7.5" in page_text and "Try **FP32** first." in page_text


def test_the_card_of_a_cpu(home, open_app, machine):
    machine()
    page_text = words(open_app(START))
    assert "No GPU to train on: no NVIDIA driver is installed." in page_text
    assert "no 16-bit matrix instructions" in page_text and "Try **FP32** first." in page_text


def test_devices_are_those_that_a_training_could_use(machine, monkeypatch):
    machine(fakes.VOLTA, fakes.HOPPER)
    result = [("cuda:0", "Tesla V100 (cuda:0)"), ("cuda:1", "NVIDIA H200 (cuda:1)"), ("cpu", "CPU")]
    assert devices.available() == (result, None)
    assert devices.memory_bytes("cuda:1") == 80 * 2**30 and devices.memory_bytes("cuda:2") is None
    machine(fakes.VOLTA, fakes.HOPPER)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert devices.available() == ([("cuda:0", "NVIDIA H200 (cuda:0)"), ("cpu", "CPU")], None)
    machine(fakes.VOLTA)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert devices.available() == ([("cpu", "CPU")], "CUDA_VISIBLE_DEVICES='-1' names no GPU")
    machine(fakes.VOLTA, torch_version="2.13.0+cpu")
    assert "CPU build, so Tesla V100 stays unused" in devices.available()[1]


TENSOR_CORES = "pages/tensor_cores.py"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (
            {"gpus": [{"name": "Tesla V100", "capability": "7.0"}] * 2, "cpu": "a CPU"},
            ["2 × Tesla V100: Tensor cores for FP16; not BF16, TF32 or FP8", "Try FP16 AMP first."],
        ),
        (
            {"gpus": [{"name": "GeForce GTX 1080", "capability": "6.1"}]},
            ["No tensor cores: they start at", "Try FP32"],
        ),
        ({"gpus": [], "cpu": "Xeon", "cpu_16bit": ["amx_bf16"]}, ["Xeon: BF16 by AMX tiles.", "Try BF16 AMP first."]),
        ({"cpu": "Xeon", "cpu_16bit": []}, ["Xeon: no 16-bit matrix instructions", "Try FP32 first."]),
        ({"cpu": "Xeon"}, ["Xeon: its instructions are not known.", "Try FP32 first."]),
        ({"gpus": [{"name": 7, "capability": ["x", {}]}, "no"]}, ["7: Not an NVIDIA GPU of a known generation"]),
        ({"gpus": 5, "cpu": {"a": 1}}, []),
    ],
)
def test_the_card_of_the_machine_of_a_run(home, open_app, environment, expected):
    with RunWriter(home.runs / "a", environment=environment) as writer:
        writer.append("steps", {"step": [0, 1], "loss": [2.0, 1.9]})
    app = open_app(TENSOR_CORES, run="run/a")
    assert not app.exception
    shown = words(app).replace("**", "")
    for part in expected:
        assert part in shown
    assert ("What this run's machine supports" in shown) is bool(expected)
