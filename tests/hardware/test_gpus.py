"""Capabilities of GPUs and CPUs by generation, and the recipe that is advised for them."""

import pytest

from amp_core.hardware.data_sheets import dense_rates
from amp_core.hardware.gpus import PRECISIONS, Gpu, cpu_abilities, first_recipe, first_recipe_on_cpu, gpu_of
from amp_core.settings.training import RECIPES
from amp_core.text.formatting import join_words

KINDS = {
    "Tesla K80": ((3, 7), "Kepler", ()),
    "Tesla M40": ((5, 2), "Maxwell", ()),
    "Tesla P100-PCIE-16GB": ((6, 0), "Pascal", ()),
    "NVIDIA GeForce GTX 1080 Ti": ((6, 1), "Pascal", ()),
    "Tesla V100-SXM2-32GB": ((7, 0), "Volta", ("fp16",)),
    "Xavier": ((7, 2), "Volta", ("fp16", "int8")),
    "Tesla T4": ((7, 5), "Turing", ("fp16", "int8")),
    "NVIDIA TITAN RTX": ((7, 5), "Turing", ("fp16", "int8")),
    "NVIDIA GeForce RTX 2060": ((7, 5), "Turing", ("fp16", "int8")),
    "Quadro RTX 4000": ((7, 5), "Turing", ("fp16", "int8")),
    "NVIDIA A100-SXM4-80GB": ((8, 0), "Ampere", ("fp16", "bf16", "tf32", "int8", "fp64")),
    "NVIDIA GeForce RTX 3090": ((8, 6), "Ampere", ("fp16", "bf16", "tf32", "int8")),
    "NVIDIA RTX A1000": ((8, 6), "Ampere", ("fp16", "bf16", "tf32", "int8")),
    "NVIDIA RTX A2000": ((8, 6), "Ampere", ("fp16", "bf16", "tf32", "int8")),
    "NVIDIA L4": ((8, 9), "Ada Lovelace", ("fp16", "bf16", "tf32", "fp8", "int8")),
    "NVIDIA H200": ((9, 0), "Hopper", ("fp16", "bf16", "tf32", "fp8", "int8", "fp64")),
    "NVIDIA B200": ((10, 0), "Blackwell", PRECISIONS),
    "NVIDIA GeForce RTX 5090": ((12, 0), "Blackwell", ("fp16", "bf16", "tf32", "fp8", "fp4", "int8")),
}

WITHOUT = [
    "NVIDIA GeForce GTX 1650",
    "GeForce GTX 1660 Ti with Max-Q Design",
    "NVIDIA GeForce GTX 1630",
    "NVIDIA GeForce MX450",
    "NVIDIA GeForce MX550",
    "Quadro T1000",
    "Quadro T2000 with Max-Q Design",
    "NVIDIA T400 4GB",
    "NVIDIA T600 Laptop GPU",
    "NVIDIA T1000 8GB",
    "NVIDIA T1200 Laptop GPU",
    "CMP 30HX",
]


@pytest.mark.parametrize("name", KINDS)
def test_each_generation_has_the_formats_of_its_white_paper(name):
    capability, architecture, takes = KINDS[name]
    gpu = Gpu(name, capability)
    assert gpu.architecture == architecture
    assert {p for p in PRECISIONS if gpu.takes(p)} == set(takes)
    assert gpu.has_tensor_cores is bool(takes)
    assert gpu.takes("fp32") is False
    assert gpu.counts_tensor_use is (capability >= (9, 0))


@pytest.mark.parametrize("name", WITHOUT)
def test_turing_gpus_without_tensor_cores_are_known_by_name(name):
    gpu = Gpu(name, (7, 5))
    assert gpu.has_tensor_cores is False and not any(gpu.takes(p) for p in PRECISIONS)
    assert gpu.in_words().startswith("No tensor cores, despite compute capability 7.5")
    assert first_recipe(gpu).recipe == "fp32" and "Without tensor cores" in first_recipe(gpu).why


def test_gpus_before_volta_have_no_tensor_cores():
    text = Gpu("Tesla P100", (6, 0)).in_words()
    assert text == "No tensor cores: they start at compute capability 7.0, and this GPU has compute capability 6.0."
    assert first_recipe(Gpu("Tesla P100", (6, 0))).recipe == "fp32"


@pytest.mark.parametrize(
    ("name", "capability"), [("AMD Radeon RX 7900 XTX", (11, 0)), ("NVIDIA Z1", (13, 0)), ("NVIDIA H200", None)]
)
def test_unknown_gpus_have_no_capabilities(name, capability):
    gpu = Gpu(name, capability)
    assert gpu.architecture is gpu.has_tensor_cores is gpu.takes("fp16") is gpu.counts_tensor_use is None
    assert "matrix units are unknown" in gpu.in_words()


def test_amd_names_the_inputs_of_its_matrix_cores():
    gpu = Gpu("AMD Instinct MI300X", (9, 4))
    assert gpu.has_tensor_cores is None
    assert gpu.in_words() == "Matrix cores for FP64, FP32, TF32, FP16, BF16 and FP8 (CDNA 3)."
    assert "TF32" not in Gpu("AMD Instinct MI250X", (9, 0)).in_words()


def test_the_description_names_present_and_missing_formats():
    assert Gpu("Tesla T4", (7, 5)).in_words() == (
        "Tensor cores for FP16; not BF16, TF32 or FP8 (Turing, compute capability 7.5)."
    )
    assert "Tensor cores for FP16, BF16, TF32 and FP8 (Hopper" in Gpu("NVIDIA H200", (9, 0)).in_words()
    assert join_words(["a"]) == "a" and join_words(["a", "b", "c"]) == "a, b and c"


@pytest.mark.parametrize(("name", "recipe"), [("Tesla V100", "fp16"), ("Tesla T4", "fp16"), ("NVIDIA L4", "bf16")])
def test_the_recipe_to_try_first_follows_the_tensor_cores(name, recipe):
    capability = {"Tesla V100": (7, 0), "Tesla T4": (7, 5), "NVIDIA L4": (8, 9)}[name]
    advice = first_recipe(Gpu(name, capability))
    assert advice.recipe == recipe and advice.recipe in RECIPES and len(advice.why) > 30


@pytest.mark.parametrize(
    ("flags", "recipe", "names"),
    [
        ({"avx2"}, "fp32", []),
        ({"avx512_bf16", "avx512f"}, "bf16", ["AVX512-BF16"]),
        ({"amx_bf16", "amx_fp16", "avx512_bf16", "avx512_fp16"}, "bf16", ["AMX tiles", "AVX512-BF16"]),
        ({"avx512_fp16"}, "fp16", []),
        ({"asimd", "asimdhp", "bf16", "svebf16"}, "bf16", ["Arm BF16", "SVE BF16"]),
        (None, "fp32", None),
    ],
)
def test_the_advice_for_a_cpu_follows_its_instructions(flags, recipe, names):
    assert first_recipe_on_cpu(flags).recipe == recipe
    if flags is not None:
        assert cpu_abilities(flags)["bf16"] == names


@pytest.mark.parametrize(
    ("text", "capability"),
    [("8.0", (8, 0)), ((9, 0), (9, 0)), ([12, 0], (12, 0)), (None, None), ("8", None), (["x", {}], None)],
)
def test_a_capability_is_parsed_as_heads_and_drivers_write_it(text, capability):
    assert gpu_of("NVIDIA", text).capability == capability
    assert gpu_of(None, text).name == ""


@pytest.mark.parametrize(
    ("name", "half"),
    [
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", None),
        ("NVIDIA GeForce RTX 2080 Ti with Max-Q Design", None),
        ("NVIDIA GH200 480GB", 990.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
    ],
)
def test_a_part_gets_no_rates_of_a_larger_one_with_a_similar_name(name: str, half: float | None) -> None:
    rates = dense_rates(name)
    assert (rates.half if rates else None) == half
