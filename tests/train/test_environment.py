"""`ampscope env` on machines of every kind: formats of the tensor cores, abilities of the CPU, the recipe to try
first."""

import json
from types import SimpleNamespace

import pytest
import torch

from amp_core.__main__ import main
from amp_core.cli.env import in_words
from amp_core.hardware.nvml import Nvml, NvmlError
from amp_core.train import RECIPES
from amp_core.train import environment as environments
from tests.record import fake_nvml as fakes
from tests.record.fake_nvml import FakeNvml


@pytest.fixture
def machine(monkeypatch):
    """Make this machine appear to have these GPUs, usable by torch, and this CPU."""

    def make(*cards, usable=True, flags=("avx2",), nvml=None, hip=None):
        shown = list(cards) if usable else []
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(shown))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(shown))
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda i: SimpleNamespace(
                name=shown[i].name, major=shown[i].capability[0], minor=shown[i].capability[1], total_memory=80 * 2**30
            ),
        )
        monkeypatch.setattr(environments, "Nvml", lambda: Nvml(nvml or FakeNvml(*cards)))
        monkeypatch.setattr(environments, "cpu_flags", lambda: frozenset(flags) if flags is not None else None)
        return environments.environment()

    return make


@pytest.mark.parametrize(
    ("card", "recipe", "notes"),
    [
        (fakes.PASCAL, "fp32", {"fp16": "runs without tensor cores", "bf16": "runs, but emulated", "tf32": "the same"}),
        (fakes.GTX16, "fp32", {"fp16": "runs without tensor cores", "bf16": "runs, but emulated", "tf32": "the same"}),
        (fakes.VOLTA, "fp16", {"fp16": "on tensor cores", "bf16": "runs, but emulated", "tf32": "the same as fp32"}),
        (fakes.AMPERE, "bf16", {"fp16": "on tensor cores", "bf16": "on tensor cores", "tf32": "on tensor cores"}),
        (fakes.HOPPER, "bf16", {"fp32": "native, on CUDA cores", "fp16-pure": "on tensor cores"}),
    ],
    ids=lambda value: value.name if isinstance(value, fakes.Card) else "",
)
def test_each_gpu_lists_the_formats_of_its_tensor_cores(machine, card, recipe, notes):
    result = machine(card)
    assert result["advice"]["recipe"] == recipe and len(result["advice"]["why"]) > 40
    for name, note in notes.items():
        assert result["recipes"][name]["note"].startswith(note)
    gpu = result["gpus"][0]
    assert gpu["capability"] == f"{card.capability[0]}.{card.capability[1]}" and gpu["usable"]
    assert gpu["tensor_cores"]["fp16"] is (recipe != "fp32")
    message = in_words(result)
    assert gpu["says"] in message and f"recommended first: {recipe}." in message
    assert ("GPM" in message) is (card.capability >= (9, 0))
    json.dumps(result, allow_nan=False)


def test_a_gpu_without_tensor_cores_is_reported_as_such(machine):
    assert "No tensor cores: they start at compute capability 7.0" in in_words(machine(fakes.PASCAL))
    assert "No tensor cores, despite compute capability 7.5" in in_words(machine(fakes.GTX16))


def test_driver_and_its_cuda_are_named(machine):
    result = machine(fakes.HOPPER)
    assert (result["driver"], result["driver_cuda"], result["nvml"]) == ("580.65.06", "13.0", "answers")
    assert "580.65.06, runs CUDA up to 13.0" in in_words(result)


def test_a_gpu_that_torch_cannot_use_is_reported_and_the_cpu_is_advised(machine):
    result = machine(fakes.AMPERE, usable=False, flags=("avx512_bf16",))
    assert not result["gpus"][0]["usable"] and "(torch cannot use it)" in in_words(result)
    assert result["device"] == "cpu" and result["advice"]["recipe"] == "bf16"
    assert result["recipes"]["bf16"]["note"] == "native (AVX512-BF16)"


@pytest.mark.parametrize(
    ("flags", "recipe", "fp16", "bf16"),
    [
        (("avx2",), "fp32", "runs, but slowly: this CPU has no FP16", "runs, but slowly: this CPU has no BF16"),
        (("amx_bf16", "avx512_fp16"), "bf16", "native (AVX512-FP16)", "native (AMX tiles)"),
        (None, "fp32", "runs; this CPU's native support is unknown", "runs; this CPU's native support"),
    ],
)
def test_a_cpu_lists_its_16_bit_instructions(machine, flags, recipe, fp16, bf16):
    result = machine(flags=flags, nvml=FakeNvml(init="NVML_ERROR_LIBRARY_NOT_FOUND"))
    assert result["advice"]["recipe"] == recipe
    assert result["recipes"]["fp16"]["note"].startswith(fp16) and result["recipes"]["bf16"]["note"].startswith(bf16)
    assert "GPU           none: no NVIDIA driver is installed" in in_words(result)
    assert list(result["recipes"]) == list(RECIPES)


def test_an_amd_gpu_is_not_mistaken_for_an_nvidia_one_with_the_same_number(machine):
    card = fakes.Card("Instinct MI250X", (9, 0))
    result = machine(card, hip="6.2", nvml=FakeNvml(init="NVML_ERROR_LIBRARY_NOT_FOUND"))
    gpu = result["gpus"][0]
    assert gpu["name"] == "AMD Instinct MI250X" and gpu["capability"] is None
    assert set(gpu["tensor_cores"].values()) == {None} and gpu["says"].startswith("Matrix cores for FP64, FP32")
    assert result["recipes"]["bf16"]["note"].startswith("runs; support by this GPU")


def test_flags_are_the_defaults_and_those_set_by_environment_variables(machine, monkeypatch, capsys):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    result = machine(fakes.AMPERE)
    assert result["flags"]["tf32_matmul"] is torch.backends.cuda.matmul.allow_tf32
    assert result["flags"]["matmul_precision"] == torch.get_float32_matmul_precision()
    assert result["overrides"] == {"NVIDIA_TF32_OVERRIDE": "0"} or "CUDA_VISIBLE_DEVICES" in result["overrides"]
    assert "NVIDIA_TF32_OVERRIDE=0" in in_words(result)


def test_a_missing_nvml_package_is_given_as_the_reason(monkeypatch):
    def missing():
        raise NvmlError("the package nvidia-ml-py is not installed")

    monkeypatch.setattr(environments, "Nvml", missing)
    assert environments._driver()["nvml"] == "the package nvidia-ml-py is not installed"


def test_the_command_prints_text_or_one_json_document(capsys):
    assert main(["env"]) == 0
    assert "recommended first: " in capsys.readouterr().out
    assert main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["advice"]["recipe"] in RECIPES
